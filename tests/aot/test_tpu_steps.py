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
from compiled_steps import pool_copies

from benchmarks.tpu_aot import MODELS, TARGETS, measure
from benchmarks.tpu_peers import Shape, our_decode
from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.aot.steps import abstract_params, compile_step, settings_of
from radix_jax.aot.tpu_compiling import TpuProgram, compile_for_tpu
from radix_jax.aot.tpu_targets import tpu_target_of
from radix_jax.config import EngineConfig
from radix_jax.functional import init_kv
from radix_jax.runner.sampler_state import sampler_state_bytes

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "tpu_aot.json"
# 2 layers and a narrow vocabulary, of Llama 3 8B, and of SmolLM2, whose heads are half a lane group.
MODELS_OF_TWO_LAYERS = {
    name: dataclasses.replace(MODEL_SHAPES[name], num_layers=2, vocab_size=2048)
    for name in ("llama3-8b", "smollm2-135m")
}
KINDS = ("decode", "prefill")
# What XLA could hide in VMEM is smaller.
LEAST_POOL_BYTES = 256 * 2**20
KERNELS = {
    "decode": {"paged_attention_decode"},
    # Rows of one token are decode's, in a step of chunks too.
    "prefill": {"paged_attention_decode", "paged_attention_extend", "paged_attention_write"},
}


@functools.cache
def compiled(target: str, model: str, kind: str) -> tuple[TpuProgram, int]:
    """(a step, elements of its pool)."""
    config = MODELS_OF_TWO_LAYERS[model]
    settings = settings_of(EngineConfig(max_model_len=4096), config, "tpu")
    bucket = dict(zip(KINDS, settings.largest, strict=True))[kind]
    pool_of = functools.partial(init_kv, config, page_size=16, dtype="bfloat16", attention_backend="pallas_tpu")
    page_bytes = 2 * math.prod(jax.eval_shape(lambda: pool_of(num_pages=2)).shape) // 2
    num_pages = 2 * LEAST_POOL_BYTES // page_bytes
    program = compile_step(tpu_target_of(target), abstract_params(config, "bfloat16"), bucket, settings, num_pages)
    return program, math.prod(jax.eval_shape(lambda: pool_of(num_pages=num_pages)).shape)


@pytest.mark.slow
@needs_libtpu()
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("target", "model", "kind"),
    [
        *((target, "llama3-8b", "decode") for target in ("v5e", "v6e", "v7x")),
        ("v5e", "smollm2-135m", "prefill"),
        ("v6e", "smollm2-135m", "prefill"),
    ],
)
def test_the_pool_is_updated_in_place(target: str, model: str, kind: str) -> None:
    check_that_the_pool_stays(target, model, kind)


@pytest.mark.aot
@needs_libtpu()
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["v5e", "v6e", "v7x"])
@pytest.mark.parametrize("model", MODELS_OF_TWO_LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_is_updated_in_place_everywhere(target: str, model: str, kind: str) -> None:
    check_that_the_pool_stays(target, model, kind)


def check_that_the_pool_stays(target: str, model: str, kind: str) -> None:
    program, num_elements = compiled(target, model, kind)
    pool_bytes = 2 * num_elements
    assert pool_bytes > LEAST_POOL_BYTES
    # The program gives the pool and the sampler's state, and the tokens that it sampled, which are new.
    settings = settings_of(EngineConfig(max_model_len=4096), MODELS_OF_TWO_LAYERS[model], "tpu")
    sampler_bytes = sampler_state_bytes(settings.max_running_requests, MODELS_OF_TWO_LAYERS[model].vocab_size)
    assert program.alias_bytes == pool_bytes + sampler_bytes
    assert program.temp_bytes < pool_bytes / 2
    assert pool_copies(program.text, num_elements) == []
    assert {kernel.name for kernel in program.kernels} == KERNELS[kind]
    assert all(kernel.launches == 2 for kernel in program.kernels)


@pytest.mark.aot
@needs_libtpu()
def test_a_pool_that_is_not_given_away_is_copied() -> None:
    """The look for copies finds one where there is one."""
    decode = our_decode("v5e", Shape(context=4096))
    num_elements = math.prod(decode.args[3].shape)
    assert 2 * num_elements > LEAST_POOL_BYTES
    kept, given = (
        compile_for_tpu(tpu_target_of("v5e"), decode.fn, *decode.args, donate_argnums=donated)
        for donated in ((), decode.donate_argnums)
    )
    assert (kept.alias_bytes, given.alias_bytes) == (0, 2 * num_elements)
    assert "copy" in pool_copies(kept.text, num_elements)
    assert pool_copies(given.text, num_elements) == []


@pytest.mark.aot
@needs_libtpu()
@pytest.mark.parametrize("name", ["v5e", "v7x"])
def test_pages_take_no_more_memory_than_their_lanes(name: str) -> None:
    """The smallest pages, of one kv head of 64, as a shard has them: no tile of the device's memory is padded."""
    for page_size, dtype in ((8, "bfloat16"), (8, "float32"), (32, "float8_e4m3fn")):
        shape = Shape(num_rows=4, num_tokens=4, page_size=page_size, num_q_heads=4, num_kv_heads=1, head_dim=64)
        decode = our_decode(name, dataclasses.replace(shape, kv_dtype=dtype))
        given = compile_for_tpu(tpu_target_of(name), decode.fn, *decode.args, donate_argnums=decode.donate_argnums)
        pool = decode.args[3]
        assert pool.shape == (shape.num_pages, page_size, 2 * 64)
        assert given.alias_bytes <= 1.05 * math.prod(pool.shape) * pool.dtype.itemsize


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
