"""The layers against their formulas in plain numpy, float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radix_jax.models.layers import (
    RopeConfig,
    apply_rope,
    dense_causal_attention,
    linear,
    rms_norm,
    rope_frequencies,
    rope_tables,
    swiglu,
)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_rms_norm() -> None:
    x, weight = normal(5, 16), normal(16, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 0.1) * weight
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), 0.1), expected, rtol=1e-5)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not np.asarray(rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-6)).any()


@pytest.mark.parametrize("head_dim", [2, 16, 80])
def test_rope_turns_each_pair_by_its_angle(head_dim: int) -> None:
    """Pairs (i, i + H/2) are complex numbers, multiplied by e^(i * position * theta^(-2i/H))."""
    x, positions = normal(6, 3, head_dim), np.array([0, 1, 2, 100, 100, 2047])
    half = head_dim // 2
    angles = positions[:, None] * 500.0 ** (-2 * np.arange(half) / head_dim)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    rope = RopeConfig(theta=500.0)
    tables = rope_tables(rope, head_dim, jnp.asarray(positions, jnp.int32))
    # The angle is a float32: at position 2047 it is exact to 2047 * eps.
    np.testing.assert_allclose(apply_rope(jnp.asarray(x), *tables), expected, rtol=0, atol=4 * 2047 * 1.2e-7)


def test_rope_scores_depend_on_the_distance_alone() -> None:
    q, k = normal(1, 1, 32), normal(1, 1, 32, seed=1)

    def score(q_position: int, k_position: int) -> float:
        turned = [
            apply_rope(jnp.asarray(x), *rope_tables(RopeConfig(), 32, jnp.asarray([position], jnp.int32)))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return float(jnp.vdot(*turned))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 0.01


def test_frequencies_are_float32() -> None:
    assert rope_frequencies(RopeConfig(), 64).dtype == np.float32
    assert rope_frequencies(RopeConfig(kind="llama3", factor=8.0), 64).dtype == np.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_accumulates_in_float32(dtype: str) -> None:
    x, kernel = jnp.asarray(normal(3, 256), dtype), jnp.asarray(normal(256, 5, seed=1), dtype)
    out = linear(x, kernel)
    assert out.dtype == jnp.float32
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


def test_swiglu() -> None:
    x, gate, up, down = normal(3, 8), normal(8, 12, seed=1), normal(8, 12, seed=2), normal(12, 8, seed=3)
    gated = x.astype(np.float64) @ gate
    expected = (gated / (1 + np.exp(-gated)) * (x @ up)) @ down
    np.testing.assert_allclose(swiglu(*map(jnp.asarray, (x, gate, up, down))), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_dense_causal_attention(num_heads: int, num_kv_heads: int) -> None:
    q = normal(9, num_heads, 8)
    k, v = normal(9, num_kv_heads, 8, seed=1), normal(9, num_kv_heads, 8, seed=2)
    expected = np.zeros(q.shape)
    for t in range(9):
        for head in range(num_heads):
            group = head // (num_heads // num_kv_heads)
            weights = np.exp(k[: t + 1, group].astype(np.float64) @ q[t, head] / np.sqrt(8))
            expected[t, head] = weights @ v[: t + 1, group] / weights.sum()
    out = jax.jit(dense_causal_attention)(q, k, v)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
