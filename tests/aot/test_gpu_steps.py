"""Whole steps compiled for an H200 that is not there: the pool is updated in place, whatever its size."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
from aot_extra import needs_compilers
from compiled_steps import pool_copies

from benchmarks.gpu_aot import MODELS, measure
from benchmarks.gpu_static import Shape, programs
from radix_jax.aot.compiling import CompiledProgram, compile_for
from radix_jax.aot.kernel_report import KernelReport
from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.aot.steps import abstract_params, compile_step, settings_of
from radix_jax.aot.targets import target_of
from radix_jax.config import EngineConfig
from radix_jax.functional import kv_width
from radix_jax.runner.sampler_state import sampler_state_bytes

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_aot.json"
MODEL = dataclasses.replace(MODEL_SHAPES["llama3-8b"], num_layers=2, vocab_size=32000)
SETTINGS = settings_of(EngineConfig(max_model_len=4096), MODEL)
KINDS = ("decode", "prefill")
# Pages a layer: pools of 0.5 GB, which no copy could hide in, and of 66 GB, a hundred times what a step needs besides.
SMALL_POOL, LARGE_POOL = 4000, 500000
OF_DECODE = {"combine_kernel", "decode_kernel", "write_kernel"}


SAMPLER_BYTES = sampler_state_bytes(SETTINGS.max_running_requests, MODEL.vocab_size)


def pool_len(num_pages: int) -> int:
    """Elements of a pool."""
    return MODEL.num_layers * num_pages * SETTINGS.page_size * kv_width(MODEL)


def pool_bytes(num_pages: int) -> int:
    """Bytes of a pool, bfloat16."""
    return 2 * pool_len(num_pages)


@functools.cache
def compiled(kind: str, num_pages: int) -> CompiledProgram:
    bucket = dict(zip(KINDS, SETTINGS.largest, strict=True))[kind]
    return compile_step(target_of("h200"), abstract_params(MODEL, "bfloat16"), bucket, SETTINGS, num_pages)


@pytest.mark.slow
@needs_compilers()
@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_is_updated_in_place(kind: str) -> None:
    small, large = (compiled(kind, num_pages).executable.memory_analysis() for num_pages in (SMALL_POOL, LARGE_POOL))
    assert small.alias_size_in_bytes == pool_bytes(SMALL_POOL) + SAMPLER_BYTES
    assert large.alias_size_in_bytes == pool_bytes(LARGE_POOL) + SAMPLER_BYTES
    assert large.temp_size_in_bytes == pytest.approx(small.temp_size_in_bytes, rel=0.01)
    assert large.temp_size_in_bytes < pool_bytes(LARGE_POOL) / 100
    for num_pages in (SMALL_POOL, LARGE_POOL):
        assert pool_copies(compiled(kind, num_pages).executable.as_text(), pool_len(num_pages)) == []


@pytest.mark.slow
@needs_compilers()
def test_a_pool_that_is_not_given_away_is_copied() -> None:
    """The look for copies finds one where there is one."""
    fn, args, donated = next(one for one in programs(Shape(128)) if one[2])
    num_elements = math.prod(args[0].shape)
    kept, given = (compile_for(target_of("h200"), fn, *args, donate_argnums=argnums) for argnums in ((), donated))
    assert "copy" in pool_copies(kept.executable.as_text(), num_elements)
    assert pool_copies(given.executable.as_text(), num_elements) == []


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
        assert step.alias_bytes == step.pool_bytes + step.sampler_bytes
        assert step.temp_bytes <= 1.1 * then[step.kind]["temp_bytes"] + 2**20
        assert step.moved_bytes == then[step.kind]["moved_bytes"]
        kernels = [kernel for kernel in step.kernels if isinstance(kernel, KernelReport)]
        assert len(kernels) == len(step.kernels) > 0
        assert all((kernel.spilled_bytes, kernel.atomics) == (0, 0) for kernel in kernels)
