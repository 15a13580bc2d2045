"""Choosing each row's next token on the device."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int32, UInt32

from radix_jax.arrays import SamplingInputs


def sample(logits: Float32[jax.Array, "B V"], sampling: SamplingInputs) -> Int32[jax.Array, " B"]:
    """One token a row: the argmax where temperature is 0, else drawn from the filtered softmax of logits / temperature.

    Filters apply as in vLLM: temperature, then min_p, then top_k, then top_p over what top_k left. Tokens that tie with
    the last one that a filter keeps are kept too. A draw is the argmax of logits + Gumbel noise (Gumbel 1954), whose
    key is a function of (seed, sample_index, position) alone. Work that no row asks for is skipped.
    """
    rows = jax.tree.map(jnp.asarray, sampling)
    draws = rows.temperature > 0.0

    def drawn() -> Int32[jax.Array, " B"]:
        scaled = logits / jnp.where(draws, rows.temperature, 1.0)[:, None]
        filters = draws & ((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0))
        kept = jax.lax.cond(jnp.any(filters), lambda: _filter(scaled, rows), lambda: scaled)
        noise = jax.vmap(_gumbel, in_axes=(0, 0, 0, None))(rows.seed, rows.sample_index, rows.position, logits.shape[1])
        return jnp.where(draws, jnp.argmax(kept + noise, axis=-1), greedy()).astype(jnp.int32)

    def greedy() -> Int32[jax.Array, " B"]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.cond(jnp.any(draws), drawn, greedy)


def _filter(logits: Float32[jax.Array, "B V"], rows: SamplingInputs) -> Float32[jax.Array, "B V"]:
    """`logits` with what min_p, top_k and top_p drop at minus infinity."""
    descending = -jnp.sort(-logits, axis=-1)
    top_k = jnp.asarray(rows.top_k)[:, None]
    kth = jnp.take_along_axis(descending, jnp.clip(top_k - 1, 0, logits.shape[1] - 1), axis=-1)
    kept = (descending >= kth) | (top_k == 0)
    # log(0) is minus infinity: min_p = 0 keeps all.
    kept &= descending >= descending[:, :1] + jnp.log(jnp.asarray(rows.min_p))[:, None]
    kept &= _within_top_p(jnp.where(kept, descending, -jnp.inf), jnp.asarray(rows.top_p))
    lowest = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)


def _within_top_p(descending: Float32[jax.Array, "B V"], top_p: Float32[jax.Array, " B"]) -> Bool[jax.Array, "B V"]:
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Rounding may leave the sum short of 1: top_p = 1 keeps all whatever the sum.
    return (before < top_p[:, None]) | (top_p >= 1.0)[:, None]


def _gumbel(
    seed: UInt32[jax.Array, "2"], sample_index: Int32[jax.Array, ""], position: Int32[jax.Array, ""], num: int
) -> Float32[jax.Array, " V"]:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    return jax.random.gumbel(key, (num,), jnp.float32)
