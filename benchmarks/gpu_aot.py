"""Whole steps of real models for an H200 that is not there: python -m benchmarks.gpu_aot

SmolLM2-135M, Llama-3.1-8B and two Qwens, each in the engine's largest decode and prefill bucket at 4,096 tokens of
context. One JSON list, a report a model; recorded in benchmarks/results/gpu_aot.json.
Needs: pip install 'radix_jax[aot]'.
"""

import dataclasses
import json
import sys

import jax

from radix_jax.aot.compiling import check_installed, use_cpu
from radix_jax.aot.report import ModelReport, report_model
from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.aot.steps import settings_of
from radix_jax.aot.targets import target_of
from radix_jax.config import EngineConfig

MODELS = ("smollm2-135m", "llama3-8b", "qwen2.5-7b", "qwen3-8b")
CONTEXT_LEN = 4096


def measure(name: str, target: str = "h200") -> ModelReport:
    """The report of a model."""
    shape = MODEL_SHAPES[name]
    settings = settings_of(EngineConfig(max_model_len=CONTEXT_LEN), shape)
    return report_model(target_of(target), name, shape, settings, CONTEXT_LEN)


def main() -> None:
    """Measure and print."""
    use_cpu()
    try:
        check_installed()
    except ImportError as error:
        sys.exit(f"error: {error}")
    reports = [dataclasses.asdict(measure(name)) | {"jax": jax.__version__} for name in MODELS]
    print(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
