"""Log-probabilities of what a step samples, computed only where a row asks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import StepInputs
from radix_jax.plan import PromptLogprobs, TokenLogprobs
from radix_jax.request import MAX_LOGPROBS

# Tokens whose logits are in memory at once; every bucket of prompts has a multiple of them, and one shape for all
# makes a token's logits the same in each.
_TILE_LEN = 64


def token_logprobs(
    logits: Float32[jax.Array, "B V"],
    tokens: Int32[jax.Array, " B"],
    sampling: Float32[jax.Array, " B"],
    num_logprobs: Int32[jax.Array, " B"],
) -> TokenLogprobs:
    """What `logits`, as the model gave them, say of `tokens`, and of the MAX_LOGPROBS most likely ones where a row asks
    for any. sampling: the tokens' log-probabilities in what they were drawn from."""
    return jax.lax.cond(
        jnp.any(num_logprobs >= 0),
        lambda: _logprobs(logits, tokens, num_logprobs)._replace(sampling=sampling),
        lambda: _no_logprobs(*logits.shape),
    )


def prompt_logprobs(
    hidden: Float[jax.Array, "T D"],
    inputs: StepInputs,
    logits_of: Callable[[Float[jax.Array, "T D"]], Float32[jax.Array, "T V"]],
    vocab_size: int,
) -> PromptLogprobs:
    """What the logits of each token say of the token behind it in its row's prompt, where the row asks.

    Tile by tile; a tile of which no row asks costs nothing.
    """
    assert inputs.next_ids is not None
    assert inputs.num_prompt_logprobs is not None
    num_tokens = hidden.shape[0]
    starts, ends = jnp.asarray(inputs.cu_q_lens)[:-1], jnp.asarray(inputs.cu_q_lens)[1:]
    last = jnp.where(ends > starts, ends - 1, num_tokens)  # padding rows: nowhere
    targets = jnp.roll(jnp.asarray(inputs.token_ids), -1).at[last].set(jnp.asarray(inputs.next_ids), mode="drop")
    rows = jnp.searchsorted(ends, jnp.arange(num_tokens), side="right")
    nums_top = jnp.append(jnp.asarray(inputs.num_prompt_logprobs), -1)[rows]  # -1 behind the last row
    tiled = jax.tree.map(lambda x: x.reshape(-1, _TILE_LEN, *x.shape[1:]), (hidden, targets, nums_top))

    def of_tile(tile: tuple[jax.Array, jax.Array, jax.Array]) -> TokenLogprobs:
        tile_hidden, tile_targets, tile_nums_top = tile
        return jax.lax.cond(
            jnp.any(tile_nums_top >= 0),
            lambda: _logprobs(logits_of(tile_hidden), tile_targets, tile_nums_top),
            lambda: _no_logprobs(_TILE_LEN, vocab_size),
        )

    tiles = jax.lax.map(of_tile, tiled)
    flat = jax.tree.map(lambda x: x.reshape(num_tokens, *x.shape[2:]), tiles)
    return PromptLogprobs(flat.sampled, flat.rank, flat.top_ids, flat.top)


def logprob_of(logits: Float32[jax.Array, "B V"], tokens: Int32[jax.Array, " B"]) -> Float32[jax.Array, " B"]:
    """Of each row's token, by the softmax of its logits."""
    own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return own - jax.nn.logsumexp(logits, axis=-1)


def _logprobs(
    logits: Float32[jax.Array, "B V"], tokens: Int32[jax.Array, " B"], num_logprobs: Int32[jax.Array, " B"]
) -> TokenLogprobs:
    num_rows, vocab_size = logits.shape
    none = _no_logprobs(num_rows, vocab_size)

    def some_tops() -> tuple[jax.Array, jax.Array]:
        tops, top_ids = jax.lax.top_k(logits, none.top.shape[1])
        return tops, top_ids

    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    rank = jnp.sum(logits >= own, axis=-1, dtype=jnp.int32)
    tops, top_ids = jax.lax.cond(jnp.any(num_logprobs > 0), some_tops, lambda: (none.top, none.top_ids))
    return TokenLogprobs((own - total)[:, 0], rank, none.sampling, top_ids, tops - total)


def _no_logprobs(num_rows: int, vocab_size: int) -> TokenLogprobs:
    zeros, num_top = jnp.zeros(num_rows, jnp.float32), min(MAX_LOGPROBS, vocab_size)
    tops = jnp.zeros((num_rows, num_top), jnp.float32)
    return TokenLogprobs(zeros, jnp.zeros(num_rows, jnp.int32), zeros, tops.astype(jnp.int32), tops)
