"""The offline workloads on a model: python -m benchmarks.offline --json

With --shape llama3-8b --random-weights the model has a known shape and random weights, so that no checkpoint is needed.
One line a workload. Each runs in a process of its own, so that its peak memory is its own. Every bucket is compiled
before the clock starts; what that took is reported apart. Waves are barriers, output is greedy and end-of-sequence is
ignored, so every engine generates the same number of tokens.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import radix_jax

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.random_weights import random_params
from benchmarks.workloads import WORKLOADS, SegmentRequest, waves
from radix_jax import Engine, EngineConfig, SamplingParams
from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.runner.resolve import default_dtype

MODEL = "smollm2-135m-instruct"
MAX_MODEL_LEN = 1024
POOL_TOKENS = 16384


@dataclass(frozen=True)
class Measurement:
    """What one run of a workload took.

    seconds: of the run, everything compiled before. output_tokens_per_s: of the same.
    prefill_computed: prompt tokens that the model computed, the rest came from the cache.
    peak_rss_bytes: of the process, loading and compiling included.
    compiles, compile_s: programs compiled before the clock started, and the seconds for them.
    compiles_timed: programs compiled while it ran; 0 unless a shape escaped the warm-up.
    padding_waste: share of the computed token places that were padding.
    """

    workload: str
    seconds: float
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens: int
    prefill_computed: int
    peak_rss_bytes: int
    compiles: int
    compile_s: float
    compiles_timed: int
    padding_waste: float
    dtype: str
    page_size: int
    prefix_cache: bool


def measure(engine: Engine, workload: str) -> Measurement:
    """Run a workload on a fresh engine, whose counts are then those of the run."""
    requests = WORKLOADS[workload]()
    engine.warm_up()
    warm = engine.stats()
    start = time.perf_counter()
    run_waves(engine, requests)
    seconds_s = time.perf_counter() - start
    stats, config = engine.stats(), engine.config
    return Measurement(
        workload=workload,
        seconds=round(seconds_s, 3),
        output_tokens=stats.num_output_tokens,
        output_tokens_per_s=round(stats.num_output_tokens / seconds_s, 2),
        prompt_tokens=stats.num_prompt_tokens,
        prefill_computed=stats.num_prefill_tokens,
        peak_rss_bytes=peak_rss_bytes(),
        compiles=warm.num_compiles,
        compile_s=round(warm.compile_s, 3),
        compiles_timed=stats.num_compiles - warm.num_compiles,
        padding_waste=round(stats.padding_waste, 4),
        dtype=str(config.dtype),
        page_size=config.page_size,
        prefix_cache=config.enable_prefix_cache,
    )


def run_waves(engine: Engine, requests: Sequence[SegmentRequest]) -> dict[int, list[int]]:
    """Serve a workload wave by wave; the generated ids of each request."""
    prompts: dict[int, list[int]] = {}
    generated: dict[int, list[int]] = {}
    for wave in waves(requests):
        running: dict[str, int] = {}
        for request in wave:
            prefix: list[int] = []
            if request.parent is not None:
                prefix = prompts[request.parent] + (generated[request.parent] if request.parent_gen else [])
            prompts[request.id] = prefix + list(request.ids)
            greedy = SamplingParams(temperature=0, max_tokens=request.max_new, ignore_eos=True)
            running[engine.add_request(prompts[request.id], greedy)] = request.id
        while engine.has_unfinished():
            for output in engine.step():
                if output.finished:
                    generated[running[output.request_id]] = output.outputs[0].token_ids
    return generated


def peak_rss_bytes() -> int:
    """Largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline", description="The offline workloads on a model."
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, with commas (default: all)")
    parser.add_argument("--model", default=MODEL, help="name, hub id, folder or .gguf file (default: %(default)s)")
    parser.add_argument("--shape", help="in place of --model: a named shape, e.g. llama3-8b; with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="weights made up on the device")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights (default: by platform)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (default: %(default)s)")
    parser.add_argument("--no-cache", action="store_true", help="compute every prompt in full")
    parser.add_argument("--json", action="store_true", help="print one JSON object a workload")
    options = parser.parse_args(arguments)
    options.workloads = options.workloads.split(",")
    unknown = sorted(set(options.workloads) - set(WORKLOADS))
    if unknown:
        parser.error(f"no workload named {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if options.random_weights != (options.shape is not None):
        parser.error("--shape and --random-weights go together: a shape has no weights of its own")
    if options.shape is not None and options.shape not in MODEL_SHAPES:
        parser.error(f"no shape named {options.shape}; there are {', '.join(MODEL_SHAPES)}")
    return options


def measure_model(options: argparse.Namespace, workload: str) -> Measurement:
    """Load the model, or make one up, and run one workload on it."""
    settings = EngineConfig(
        dtype=options.dtype,
        page_size=options.page_size,
        num_pages=POOL_TOKENS // options.page_size + 1,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_cache=not options.no_cache,
    )
    if options.shape is not None:
        return measure_shape(MODEL_SHAPES[options.shape], settings, workload)
    with radix_jax.LLM(options.model, **asdict(settings)) as llm:
        return measure(llm.engine, workload)


def measure_shape(shape: Any, settings: EngineConfig, workload: str) -> Measurement:
    """Run one workload on random weights of a model config, of `settings.dtype` or what suits the platform."""
    params = random_params(shape, settings.dtype or default_dtype())
    engine = Engine(shape, params, settings)
    try:
        return measure(engine, workload)
    finally:
        engine.close()


def as_text(measured: Measurement) -> str:
    """One line for people."""
    return (
        f"{measured.workload:10} {measured.seconds:8.2f} s {measured.output_tokens_per_s:8.1f} output tokens/s   "
        f"prefilled {measured.prefill_computed:,} of {measured.prompt_tokens:,} prompt tokens   "
        f"peak {measured.peak_rss_bytes / 1e9:.2f} GB   padding {measured.padding_waste:.0%}   "
        f"{measured.compiles} compiles in {measured.compile_s:.0f} s before"
    )


def main() -> None:
    """Measure each workload in a process of its own."""
    options = parse_arguments()
    for workload in options.workloads:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            measured = pool.submit(measure_model, options, workload).result()
        print(json.dumps(asdict(measured)) if options.json else as_text(measured), flush=True)


if __name__ == "__main__":
    main()
