"""The layers give the same inside a jitted program and outside of one."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from radix_jax.models.layers import RopeConfig, apply_rope, dense_causal_attention, rms_norm, rope_tables, swiglu


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def turned(x: jax.Array) -> jax.Array:
    positions = jnp.arange(x.shape[0], dtype=jnp.int32)
    return apply_rope(x, *rope_tables(RopeConfig(), x.shape[2], positions))


class Layers(chex.TestCase):
    """Each test runs in both variants."""

    def check(self, layer: Callable[..., jax.Array], *args: jax.Array) -> None:
        expected = jax.jit(layer)(*args)
        out = self.variant(layer)(*args)
        chex.assert_tree_all_finite(out)
        chex.assert_trees_all_equal_shapes_and_dtypes(out, expected)
        chex.assert_trees_all_close(out, expected, rtol=0, atol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_rms_norm(self) -> None:
        self.check(lambda x, weight: rms_norm(x, weight, 1e-5), normal(5, 16), normal(16, seed=1))

    @chex.variants(with_jit=True, without_jit=True)
    def test_rope(self) -> None:
        self.check(turned, normal(9, 2, 8))

    @chex.variants(with_jit=True, without_jit=True)
    def test_swiglu(self) -> None:
        self.check(swiglu, normal(3, 8), normal(8, 12, seed=1), normal(8, 12, seed=2), normal(12, 8, seed=3))

    @chex.variants(with_jit=True, without_jit=True)
    def test_attention(self) -> None:
        self.check(dense_causal_attention, normal(6, 4, 8), normal(6, 2, 8, seed=1), normal(6, 2, 8, seed=2))
