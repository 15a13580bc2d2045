"""Random weights of a model's shape, made on the device in their own dtype: for timing shapes without a checkpoint."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from radix_jax.models.base import ModelParams
from radix_jax.models.registry import family_for_config, make_params
from radix_jax.sharding import make_mesh, named_sharding


def random_params(config: Any, dtype: str, seed: int = 0) -> ModelParams:
    """Params of a registered family's `config`, in `dtype`, that keep activations and logits near 1.

    No leaf is ever in host memory, nor larger on the device than it ends up being. Norms are 1. The same for the same
    seed on every device.
    """
    specs = family_for_config(config).weight_specs(config)
    sharding = named_sharding(make_mesh())
    make = jax.jit(random_array, static_argnames=("shape", "spread", "dtype"), out_shardings=sharding)
    ones = jax.jit(jnp.ones, static_argnums=(0, 1), out_shardings=sharding)
    weights: dict[Any, Any] = {}
    for number, spec in enumerate(specs):
        if spec.optional:
            continue
        shape = spec.shape[::-1] if spec.transpose else spec.shape
        inner = functools.reduce(lambda tree, part: tree.setdefault(part, {}), spec.path[:-1], weights)
        if len(shape) == 1:
            inner[spec.path[-1]] = ones(shape, dtype)
            continue
        # The axis that a product sums over: the first of a matrix [in, out], the last of an embedding [V, D].
        num_summed = shape[0] if spec.transpose else shape[-1]
        leaf_seed = jnp.uint32((seed * len(specs) + number) % 2**32)
        inner[spec.path[-1]] = make(leaf_seed, shape=shape, spread=(3.0 / num_summed) ** 0.5, dtype=dtype)
    return make_params(config, weights)


def random_array(seed: jax.Array, *, shape: tuple[int, ...], spread: float, dtype: str) -> jax.Array:
    """Uniform in [-spread, spread) with a standard deviation of spread / sqrt(3), a pure function of place and seed.

    A hash of the place and not `jax.random`, whose bits would take a multiple of the leaf's memory.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    bits = _mixed(place ^ _mixed(seed))
    unit = (bits >> 8).astype(jnp.float32) * 2.0**-24
    return ((2.0 * unit - 1.0) * spread).astype(dtype)


def _mixed(bits: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3 (Appleby): every input bit turns half of the output bits."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
