"""Timing by chains of calls: how calls are chained; that figures come out, and what can't be chained is told."""

import jax
import jax.numpy as jnp
import pytest

from radix_jax import device_timing
from radix_jax.device_timing import measure_copy_bandwidth, measure_matmul_peak, time_calls


def test_a_chain_has_as_many_calls_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that the calls themselves advance, by a second each and three for the way there and back."""
    now = 0.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(device_timing.time, "perf_counter", lambda: now)
    wait = jax.block_until_ready

    def block(x: jax.Array) -> jax.Array:
        advance(3.0)
        return wait(x)

    monkeypatch.setattr(device_timing.jax, "block_until_ready", block)

    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, int]:
        jax.debug.callback(lambda: advance(1.0))
        return x + y, 1

    assert time_calls(step, (jnp.zeros(3), jnp.ones(3)), num_calls=16, num_repeats=2) == 1.0


def test_what_cannot_be_fed_back_is_told() -> None:
    message = r"they give float32\[3\] and args\[0\] is float32\[4\]; wrap fn"
    with pytest.raises(ValueError, match=message):
        time_calls(lambda x: x[1:], (jnp.zeros(4),))


def test_figures_of_the_device_come_out() -> None:
    assert measure_copy_bandwidth(2**22) > 0
    assert measure_matmul_peak("float32", size=64) > 0
    assert measure_matmul_peak(jnp.bfloat16, size=64) > 0
