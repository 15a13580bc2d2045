"""The engine's steps, compiled for TPUs: the pool stays where it is, and whole models are as they were recorded."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest
from aot_extra import needs_libtpu
from compiled_steps import STEPS, pool_copies

from benchmarks.tpu_aot import MODELS, TARGETS, measure
from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.aot.steps import abstract_params, settings_of
from radix_jax.aot.tpu_compiling import TpuProgram, compile_for_tpu
from radix_jax.aot.tpu_targets import tpu_target_of
from radix_jax.config import EngineConfig
from radix_jax.functional import init_kv
from radix_jax.pallas_kernels.paged_attention.tpu import paged_attention_tpu
from radix_jax.runner.pack import buffer_len
from radix_jax.runner.sampler_state import empty_sampler_state, sampler_state_bytes

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "tpu_aot.json"
# 2 layers and a narrow vocabulary, of Llama 3 8B, and of SmolLM2, whose heads are half a lane group.
MODELS_OF_TWO_LAYERS = {
    name: dataclasses.replace(MODEL_SHAPES[name], num_layers=2, vocab_size=32000) for name in ("llama3-8b", "llama3-1b")
}
KINDS = ("decode", "prefill")
# What XLA could hide in VMEM is smaller.
LEAST_POOL_BYTES = 256 * 2**20


@functools.cache
def compiled(target: str, model: str, kind: str, *, donate: bool = True) -> tuple[TpuProgram, int]:
    """(a step, elements of its pool)."""
    config = MODELS_OF_TWO_LAYERS[model]
    settings = settings_of(EngineConfig(max_model_len=4096), config, "tpu")
    bucket = dict(zip(KINDS, settings.largest, strict=True))[kind]
    num_pages = 2 * LEAST_POOL_BYTES // (2 * 2 * settings.page_size * 2 * config.num_kv_heads * config.head_dim)
    kv = jax.eval_shape(lambda: init_kv(config, num_pages, settings.page_size, "bfloat16"))
    args = (
        abstract_params(config, "bfloat16"),
        kv,
        jax.eval_shape(lambda: empty_sampler_state(settings.max_running_requests, config.vocab_size)),
        jax.ShapeDtypeStruct((settings.buckets.max_rows,), "int32"),
        jax.ShapeDtypeStruct((buffer_len(bucket),), "int32"),
    )
    step = functools.partial(STEPS[kind], bucket=bucket, attention_backend=paged_attention_tpu)
    program = compile_for_tpu(tpu_target_of(target), step, *args, donate_argnums=(1, 2) if donate else ())
    return program, math.prod(kv.shape)


@pytest.mark.slow
@needs_libtpu()
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["v5e", "v6e", "v7x"])
@pytest.mark.parametrize("model", MODELS_OF_TWO_LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_is_updated_in_place(target: str, model: str, kind: str) -> None:
    program, num_elements = compiled(target, model, kind)
    pool_bytes = 2 * num_elements
    assert pool_bytes > LEAST_POOL_BYTES
    # The program gives the pool and the sampler's state, and the tokens that it sampled, which are new.
    settings = settings_of(EngineConfig(max_model_len=4096), MODELS_OF_TWO_LAYERS[model], "tpu")
    sampler_bytes = sampler_state_bytes(settings.max_running_requests, MODELS_OF_TWO_LAYERS[model].vocab_size)
    assert program.alias_bytes == pool_bytes + sampler_bytes
    assert program.temp_bytes < pool_bytes / 2
    assert pool_copies(program.text, num_elements) == []
    assert {kernel.name for kernel in program.kernels} >= {"paged_attention_decode"}
    assert all(kernel.launches == 2 for kernel in program.kernels)


@pytest.mark.slow
@needs_libtpu()
@pytest.mark.timeout(1800)
def test_a_pool_that_is_not_given_away_is_copied() -> None:
    """The look for copies finds one where there is one."""
    program, num_elements = compiled("v5e", "llama3-8b", "decode", donate=False)
    assert program.alias_bytes == 0
    assert "copy" in pool_copies(program.text, num_elements)


def _recorded() -> dict[tuple[str, str], Any]:
    return {(one["model"], one["target"]): one for one in json.loads(RECORDED.read_text())}


@pytest.mark.aot
@needs_libtpu()
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODELS)
def test_real_models(name: str, target: str) -> None:
    if (name, target) not in _recorded():
        with pytest.raises(ValueError, match="no room for 2 pages"):
            measure(name, target)
        return
    then = {step["kind"]: step for step in _recorded()[name, target]["steps"]}
    for step in measure(name, target).steps:
        assert step.alias_bytes == step.pool_bytes + step.sampler_bytes
        assert step.temp_bytes <= 1.1 * then[step.kind]["temp_bytes"] + 2**20
        assert step.moved_bytes == then[step.kind]["moved_bytes"]
