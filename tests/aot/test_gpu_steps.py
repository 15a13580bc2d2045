"""Whole steps compiled for an H200 that is not there: the pool is updated in place, whatever its size."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
from aot_extra import needs_compilers
from compiled_steps import pool_copies

from benchmarks.gpu_aot import MODELS, measure
from radix_jax.aot.compiling import CompiledProgram
from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.aot.steps import abstract_params, compile_step, settings_of
from radix_jax.aot.targets import target_of
from radix_jax.config import EngineConfig
from radix_jax.functional import kv_width

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_aot.json"
MODEL = dataclasses.replace(MODEL_SHAPES["llama3-8b"], num_layers=2, vocab_size=32000)
SETTINGS = settings_of(EngineConfig(max_model_len=4096), MODEL)
KINDS = ("decode", "prefill")
# Pages a layer: 0.5 GB and 2.1 GB of pool. Below 256 MB a copy could hide.
SMALL_POOL, LARGE_POOL = 4000, 16000
OF_DECODE = {"combine_kernel", "decode_kernel", "write_kernel"}


def pool_len(num_pages: int) -> int:
    """Elements of a pool."""
    return MODEL.num_layers * num_pages * SETTINGS.page_size * kv_width(MODEL)


@functools.cache
def compiled(kind: str, num_pages: int) -> CompiledProgram:
    bucket = dict(zip(KINDS, SETTINGS.largest, strict=True))[kind]
    return compile_step(target_of("h200"), abstract_params(MODEL, "bfloat16"), bucket, SETTINGS, num_pages)


@pytest.mark.slow
@needs_compilers()
@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_is_updated_in_place(kind: str) -> None:
    small, large = (compiled(kind, num_pages).executable.memory_analysis() for num_pages in (SMALL_POOL, LARGE_POOL))
    assert small.alias_size_in_bytes >= 2 * pool_len(SMALL_POOL)
    assert large.alias_size_in_bytes >= 2 * pool_len(LARGE_POOL)
    assert large.temp_size_in_bytes == pytest.approx(small.temp_size_in_bytes, rel=0.01)
    # A kernel of ours that writes in place is a custom call; a copy of the pool would be in the temporaries.
    made = pool_copies(compiled(kind, LARGE_POOL).executable.as_text(), pool_len(LARGE_POOL))
    assert set(made) <= {"custom-call"}


@pytest.mark.slow
@needs_compilers()
@pytest.mark.parametrize("kind", KINDS)
def test_layers_share_one_kernel(kind: str) -> None:
    kernels = [kernel for kernel in compiled(kind, SMALL_POOL).kernels if kernel.name.endswith("_kernel")]
    assert {kernel.name for kernel in kernels} == OF_DECODE | ({"extend_kernel"} if kind == "prefill" else set())
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    for kernel in kernels:
        assert (kernel.num_launches, kernel.spilled_bytes, kernel.atomics) == (MODEL.num_layers, 0, 0)


@pytest.mark.aot
@needs_compilers()
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_real_models(name: str) -> None:
    report = measure(name)
    recorded = {one["model"]: one["steps"] for one in json.loads(RECORDED.read_text())}
    then = {step["kind"]: step for step in recorded[name]}
    for step in report.steps:
        assert step.alias_bytes >= step.pool_bytes
        assert step.temp_bytes <= 1.1 * then[step.kind]["temp_bytes"] + 2**20
        assert step.moved_bytes == then[step.kind]["moved_bytes"]
        assert all((kernel.spilled_bytes, kernel.atomics) == (0, 0) for kernel in step.kernels)
