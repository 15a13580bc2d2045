"""Choosing each row's next token on the device."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Int32, UInt32

from radix_jax.arrays import SamplerState, SamplingInputs
from radix_jax.plan import TokenLogprobs
from radix_jax.runner.logprobs import logprob_of, token_logprobs
from radix_jax.runner.sampler_state import adjust, count_tokens, reads_state

# A lower temperature is as good as greedy, and logits divided by it overflow.
MIN_TEMPERATURE = 1e-30


class Sampled(NamedTuple):
    """What a step samples. state: with the tokens counted."""

    state: SamplerState
    tokens: Int32[jax.Array, " B"]
    logprobs: TokenLogprobs


def sample(logits: Float32[jax.Array, "B V"], sampling: SamplingInputs, state: SamplerState) -> Sampled:
    """One token a row: the argmax where temperature is 0, else drawn from the filtered softmax of logits / temperature.

    The logits are those after bias, min_tokens and penalties, see `adjust`; log-probabilities are of those before it.
    Filters apply as in vLLM: temperature, then min_p, then top_k, then top_p over what top_k left. Tokens that tie with
    the last one that a filter keeps are kept too. A draw is the argmax of logits + Gumbel noise (Gumbel 1954), whose
    key is a function of (seed, sample_index, position) alone. Work that no row asks for is skipped.
    """
    rows = jax.tree.map(jnp.asarray, sampling)
    tokens, drawn_logprobs = _choose(logits, rows, state)
    logprobs = token_logprobs(logits, tokens, drawn_logprobs, rows.num_logprobs)
    return Sampled(count_tokens(state, rows, tokens), tokens, logprobs)


def _choose(
    logits: Float32[jax.Array, "B V"], rows: SamplingInputs, state: SamplerState
) -> tuple[Int32[jax.Array, " B"], Float32[jax.Array, " B"]]:
    """(the tokens; their log-probabilities in what they were drawn from, where a row asks for any, 0 if greedy)."""
    temperature, num_rows = jnp.asarray(rows.temperature), logits.shape[0]
    draws = temperature > 0.0

    def of_adjusted(compute: Callable[[jax.Array], jax.Array]) -> jax.Array:
        # Around what reads the logits, so that no array of their size is copied where nothing adjusts them.
        adjusted = lambda: compute(adjust(logits, rows, state))  # noqa: E731
        return jax.lax.cond(jnp.any(reads_state(rows)), adjusted, lambda: compute(logits))

    def drawn() -> tuple[jax.Array, jax.Array]:
        divisor = jnp.where(draws, jnp.maximum(temperature, MIN_TEMPERATURE), 1.0)[:, None]
        scaled = of_adjusted(lambda adjusted: adjusted / divisor)
        filters = draws & ((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0))
        kept = jax.lax.cond(jnp.any(filters), lambda: _filter(scaled, rows), lambda: scaled)
        seed, sample_index, position = map(jnp.asarray, (rows.seed, rows.sample_index, rows.position))
        noise = jax.vmap(_gumbel, in_axes=(0, 0, 0, None))(seed, sample_index, position, logits.shape[1])
        # Filters keep the best token, and adding 0 changes nothing: for greedy rows this is the argmax.
        tokens = jnp.argmax(kept + jnp.where(draws[:, None], noise, 0.0), axis=-1).astype(jnp.int32)
        asks = jnp.any(jnp.asarray(rows.num_logprobs) >= 0)
        return tokens, jax.lax.cond(asks, lambda: jnp.where(draws, logprob_of(kept, tokens), 0.0), zeros)

    def greedy() -> tuple[jax.Array, jax.Array]:
        return of_adjusted(lambda adjusted: jnp.argmax(adjusted, axis=-1).astype(jnp.int32)), zeros()

    def zeros() -> jax.Array:
        return jnp.zeros(num_rows, jnp.float32)

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
    # The first token is kept even where top_p is too small for float32. Rounding may leave the sum short of 1:
    # top_p = 1 keeps all whatever the sum.
    return (before == 0.0) | (before < top_p[:, None]) | (top_p >= 1.0)[:, None]


def _gumbel(
    seed: UInt32[jax.Array, "2"], sample_index: Int32[jax.Array, ""], position: Int32[jax.Array, ""], num: int
) -> Float32[jax.Array, " V"]:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    return jax.random.gumbel(key, (num,), jnp.float32)
