"""Settings that were left open, on a CPU."""

import dataclasses
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from tiny import TINY, random_weights

from radix_jax.config import EngineConfig
from radix_jax.models.base import ModelParams
from radix_jax.models.registry import make_params
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import SMEM_WORDS
from radix_jax.runner import resolve
from radix_jax.runner.resolve import default_dtype, free_ram_bytes, resolve_config
from radix_jax.runner.sampler_state import empty_sampler_state, sampler_state_bytes

PAGE_BYTES = TINY.num_layers * 16 * 2 * TINY.num_kv_heads * TINY.head_dim * 4
# Of the sampler, for as many requests as run by default; the pool gets its share of the rest.
SAMPLER_BYTES = sampler_state_bytes(EngineConfig().max_running_requests, TINY.vocab_size)


def tiny_params(max_len: int = 128, dtype: str = "float32") -> ModelParams:
    config = dataclasses.replace(TINY, max_position_embeddings=max_len)
    return make_params(config, jax.tree.map(lambda leaf: leaf.astype(dtype), random_weights(config)))


def test_defaults_fit_the_model_and_the_machine() -> None:
    config = resolve_config(EngineConfig(), tiny_params())
    assert (config.dtype, config.kv_dtype) == ("float32", "float32")
    assert config.max_model_len == 128
    assert config.num_pages == 64 * (128 // 16) + 1
    assert config.kv_memory_fraction is None
    assert config.max_pinned_tokens == 64 * 128 // 2


def test_what_is_set_is_kept() -> None:
    given = EngineConfig(
        num_pages=33,
        page_size=4,
        max_model_len=100,
        dtype="float32",
        kv_dtype="float32",
        schedule_policy="fcfs",
        attention_backend="pallas_interpret",
        max_pinned_tokens=0,
    )
    assert resolve_config(given, tiny_params()) == given


def test_context_is_capped_on_a_cpu_unless_asked_for() -> None:
    params = tiny_params(max_len=100_000)
    assert resolve_config(EngineConfig(num_pages=9), params).max_model_len == 4096
    assert resolve_config(EngineConfig(num_pages=9, max_model_len=50_000), params).max_model_len == 50_000


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len=129 exceeds the 128 positions of the model; lower it"):
        resolve_config(EngineConfig(max_model_len=129), tiny_params())


def test_dtype_is_that_of_the_params() -> None:
    params = tiny_params(dtype="bfloat16")
    config = resolve_config(EngineConfig(), params)
    assert (config.dtype, config.kv_dtype) == ("bfloat16", "float32")
    with pytest.raises(ValueError, match="dtype='float32', but params are bfloat16; cast them, or leave dtype out"):
        resolve_config(EngineConfig(dtype="float32"), params)


def test_a_slow_pool_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="radix_jax"):
        assert resolve_config(EngineConfig(kv_dtype="bfloat16"), tiny_params()).kv_dtype == "bfloat16"
    assert "kv_dtype=bfloat16 is slow on a CPU" in caplog.text


def test_a_pool_stays_within_a_quarter_of_free_ram_and_says_what_binds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "free_ram_bytes", lambda: SAMPLER_BYTES + 4 * 20 * PAGE_BYTES + 3)
    with caplog.at_level(logging.INFO, logger="radix_jax"):
        assert resolve_config(EngineConfig(), tiny_params()).num_pages == 20
    assert "pool of 20 pages" in caplog.text
    assert "bound by a quarter of the free RAM" in caplog.text


def test_a_pool_stays_within_two_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "free_ram_bytes", lambda: 2**50)
    num_pages = resolve_config(EngineConfig(max_running_requests=10**6), tiny_params()).num_pages
    assert num_pages == 2 * 1024**3 // PAGE_BYTES


def test_a_fraction_is_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "free_ram_bytes", lambda: SAMPLER_BYTES + 100 * PAGE_BYTES)
    assert resolve_config(EngineConfig(kv_memory_fraction=0.5), tiny_params()).num_pages == 50


def test_the_sampler_takes_what_is_taken_off_for_it() -> None:
    state = jax.eval_shape(lambda: empty_sampler_state(EngineConfig().max_running_requests, TINY.vocab_size))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) == SAMPLER_BYTES


def test_no_room_for_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "free_ram_bytes", lambda: SAMPLER_BYTES + 4 * PAGE_BYTES)
    with pytest.raises(ValueError, match=f"has room for 1 pages of {PAGE_BYTES} bytes, 2 are needed; free memory"):
        resolve_config(EngineConfig(), tiny_params())


def test_free_ram_is_what_the_machine_has_left() -> None:
    before = free_ram_bytes()
    assert 0 < before < 2**50
    assert isinstance(before, int)
    assert jnp.zeros(1).nbytes < before


@pytest.mark.parametrize(
    ("platform", "capability", "dtype"),
    [
        ("cpu", None, "float32"),
        ("gpu", "7.5", "float16"),
        ("gpu", "8.0", "bfloat16"),
        ("gpu", "gfx942", "bfloat16"),
        ("tpu", None, "bfloat16"),
    ],
)
def test_the_default_dtype_is_one_that_the_device_has(
    platform: str, capability: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(platform=platform, device_kind="some chip", compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert default_dtype() == dtype


def test_a_backend_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ValueError, match="'pallas_gpu'"):
        resolve_config(EngineConfig(attention_backend="pallas_gpu"), tiny_params())


def test_pages_that_the_interpreted_tpu_kernels_cannot_do_are_refused() -> None:
    config = EngineConfig(num_pages=9, page_size=8, attention_backend="pallas_tpu_interpret")
    assert resolve_config(config, tiny_params()).attention_backend == "pallas_tpu_interpret"
    with pytest.raises(ValueError, match="a power of two and at least 8 for float32, and here it is 24"):
        resolve_config(dataclasses.replace(config, page_size=24), tiny_params())
    with pytest.raises(ValueError, match="no pool of float16"):
        resolve_config(dataclasses.replace(config, kv_dtype="float16"), tiny_params())


def on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is a TPU; what it resolves is not run."""
    monkeypatch.setattr(resolve, "attention_backend", lambda requested, _: ("pallas_tpu", "this is TPU v5 lite"))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def test_a_tpu_takes_its_kernels_where_they_do_the_pages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_tpu(monkeypatch)
    assert resolve_config(EngineConfig(num_pages=9), tiny_params()).attention_backend == "pallas_tpu"
    with caplog.at_level(logging.WARNING, logger="radix_jax"):
        assert resolve_config(EngineConfig(num_pages=9, page_size=4), tiny_params()).attention_backend == "xla"
    assert "a power of two and at least 8 for float32, and here it is 4" in caplog.text
    with pytest.raises(ValueError, match="a power of two and at least 8 for float32, and here it is 4"):
        resolve_config(EngineConfig(num_pages=9, page_size=4, attention_backend="pallas_tpu"), tiny_params())


def test_context_is_capped_on_a_tpu_by_its_scalar_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    on_tpu(monkeypatch)
    params = tiny_params(max_len=131_072)
    capped = resolve_config(EngineConfig(num_pages=9), params).max_model_len
    assert capped is not None
    assert 40_000 < capped < 50_000
    assert capped % 16 == 0
    assert resolve_config(EngineConfig(num_pages=9, page_size=128), params).max_model_len == 131_072
    with pytest.raises(
        ValueError, match=f"max_model_len=65536, and max_model_len {capped} at most: .* raise page_size"
    ):
        resolve_config(EngineConfig(num_pages=9, max_model_len=65_536), params)


def test_context_on_a_tpu_has_room_in_the_rows_and_tokens_that_steps_are_padded_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_tpu(monkeypatch)
    params = tiny_params(max_len=131_072)
    lens = {}
    for num_requests in (65, 100, 128):
        config = EngineConfig(num_pages=9, page_size=16, max_running_requests=num_requests)
        lens[num_requests] = resolve_config(config, params).max_model_len
    assert lens[65] == lens[100] == lens[128]
    assert lens[128] is not None
    assert 128 * lens[128] // 16 < SMEM_WORDS
    long_steps = EngineConfig(num_pages=9, max_running_requests=128, max_prefill_tokens=60_000)
    shorter = resolve_config(long_steps, params).max_model_len
    assert shorter is not None
    assert shorter < lens[128]
    with pytest.raises(ValueError, match=r"max_model_len 0 at most: page tables of 32768 rows .* lower max_running"):
        resolve_config(EngineConfig(num_pages=9, max_running_requests=30_000), params)
