"""The work of a step, by hand, and a model's report where the compiler is not asked."""

import dataclasses

import jax
import pytest
from tiny import TINY, tiny_llama

from radix_jax.aot.roofline import page_bytes, step_work, tree_bytes
from radix_jax.aot.shapes import MODEL_SHAPES
from radix_jax.aot.steps import abstract_params, settings_of
from radix_jax.aot.targets import target_of
from radix_jax.config import EngineConfig
from radix_jax.models.registry import params_of


def test_abstract_params_are_the_params_without_values() -> None:
    real, abstract = params_of(tiny_llama()), abstract_params(TINY, "float32")
    assert jax.tree.structure(real.weights) == jax.tree.structure(abstract.weights)
    assert jax.tree.map(lambda leaf: leaf.shape, real.weights) == jax.tree.map(lambda x: x.shape, abstract.weights)


def test_llama3_8b_has_8_billion_weights_and_its_floor() -> None:
    """The figures that everybody knows: 16.06 GB in bfloat16, 131,072 bytes of KV a token."""
    params = abstract_params(MODEL_SHAPES["llama3-8b"], "bfloat16")
    assert tree_bytes(params.weights) == 2 * 8_030_261_248
    kv_token_bytes = page_bytes(params.config, 1, "bfloat16", "pallas_gpu")
    assert kv_token_bytes == 131_072
    work = step_work(params, num_rows=64, q_len=1, context_len=4096, kv_token_bytes=kv_token_bytes)
    assert work.kv_bytes == (64 * 4096 + 64) * 131_072
    assert work.weights_bytes == tree_bytes(params.weights) - 2 * params.weights["embed"].size
    assert work.attention_flop == 4 * 64 * 4096 * 32 * 32 * 128
    seconds, bound = work.seconds(target_of("h200"))
    assert bound == "bandwidth"
    assert seconds == pytest.approx((work.weights_bytes + work.kv_bytes) / 4.8e12)


def test_prefill_counts_what_each_query_sees() -> None:
    params = abstract_params(TINY, "float32")
    work = step_work(params, num_rows=2, q_len=3, context_len=5, kv_token_bytes=10)
    per_pair = 4 * TINY.num_layers * TINY.num_heads * TINY.head_dim
    assert work.attention_flop == 2 * (3 + 4 + 5) * per_pair
    assert work.kv_bytes == 2 * (5 + 3) * 10


def test_pages_are_as_wide_as_the_target_has_them() -> None:
    """3 kv heads of 80 are 480 lanes, of which a TPU makes 4 times 128, wherever this is asked."""
    config = dataclasses.replace(TINY, num_heads=3, num_kv_heads=3, head_dim=80)
    for backend, num_lanes in (("pallas_gpu", 480), ("xla", 480), ("pallas_tpu", 512)):
        assert page_bytes(config, 16, "bfloat16", backend) == config.num_layers * 16 * num_lanes * 2


def test_settings_on_a_tpu_are_those_of_its_kernels() -> None:
    """A context that fits into scalar memory; xla where the pages are not the kernels', as in the engine."""
    shape = MODEL_SHAPES["llama3-8b"]
    settings = settings_of(EngineConfig(), shape, "tpu")
    assert settings.attention_backend == "pallas_tpu"
    assert 40_000 < settings.max_model_len < 50_000 < shape.max_position_embeddings
    assert settings_of(EngineConfig(page_size=4), shape, "tpu").attention_backend == "xla"
    with pytest.raises(ValueError, match=r"max_model_len=100000, and max_model_len \d+ at most: page tables"):
        settings_of(EngineConfig(max_model_len=100_000), shape, "tpu")


def test_settings_are_filled_in() -> None:
    shape = MODEL_SHAPES["qwen2.5-7b"]
    settings = settings_of(EngineConfig(), shape)
    assert (settings.dtype, settings.kv_dtype, settings.attention_backend) == ("bfloat16", "bfloat16", "pallas_gpu")
    assert settings.max_model_len == shape.max_position_embeddings
    assert [bucket.num_tokens for bucket in settings.largest] == [64, 2048]
    with pytest.raises(ValueError, match="max_model_len=40000 exceeds the 32768 positions"):
        settings_of(EngineConfig(max_model_len=40000), shape)
