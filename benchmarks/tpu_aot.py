"""Whole steps of real models for TPUs that are not there: python -m benchmarks.tpu_aot [--target v5e:2x4]

SmolLM2-135M, Llama-3.1-8B and two Qwens, each in the engine's largest decode and prefill bucket at 4,096 tokens of
context, on one device that holds the whole model. A model that does not fit on one is left out, with a line on stderr.
One JSON list, a report a model and target; recorded in benchmarks/results/tpu_aot.json. Needs: pip install libtpu.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Sequence

import jax

from radix_jax.aot.compiling import use_cpu
from radix_jax.aot.report import ModelReport, report_model
from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.aot.steps import settings_of
from radix_jax.aot.tpu_targets import tpu_target_of
from radix_jax.config import EngineConfig

MODELS = ("smollm2-135m", "llama3-8b", "qwen2.5-7b", "qwen3-8b")
TARGETS = ("v5e:2x4", "v6e:2x2", "tpu7x:2x2x1")
CONTEXT_LEN = 4096


def measure(name: str, target: str) -> ModelReport:
    """The report of a model.

    Raises:
        ValueError: the model does not fit.
    """
    shape = MODEL_SHAPES[name]
    settings = settings_of(EngineConfig(max_model_len=CONTEXT_LEN), shape, "tpu")
    return report_model(tpu_target_of(target), name, shape, settings, CONTEXT_LEN)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="tpu_aot", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", action="append", help=f"may be repeated; by default {', '.join(TARGETS)}")
    parser.add_argument("--model", action="append", help=f"may be repeated; by default {', '.join(MODELS)}")
    args = parser.parse_args(argv)
    use_cpu()
    release = {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}
    reports = []
    for target in args.target or TARGETS:
        for name in args.model or MODELS:
            try:
                reports.append(dataclasses.asdict(measure(name, target)) | release)
            except ValueError as error:
                print(error, file=sys.stderr)
    print(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
