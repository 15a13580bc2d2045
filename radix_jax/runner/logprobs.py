"""Log-probabilities of what a step samples, computed only where a row asks."""

import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int32

from radix_jax.plan import TokenLogprobs
from radix_jax.request import MAX_LOGPROBS


def token_logprobs(
    logits: Float32[jax.Array, "B V"],
    tokens: Int32[jax.Array, " B"],
    sampling: Float32[jax.Array, " B"],
    num_logprobs: Int32[jax.Array, " B"],
) -> TokenLogprobs:
    """What `logits`, as the model gave them, say of `tokens`, and of the MAX_LOGPROBS most likely ones where a row asks
    for any. sampling: the tokens' log-probabilities in what they were drawn from."""
    num_rows, vocab_size = logits.shape
    num_top = min(MAX_LOGPROBS, vocab_size)

    def no_tops() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((num_rows, num_top), jnp.float32), jnp.zeros((num_rows, num_top), jnp.int32)

    def some_tops() -> tuple[jax.Array, jax.Array]:
        tops, top_ids = jax.lax.top_k(logits, num_top)
        return tops, top_ids

    def asked() -> TokenLogprobs:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
        rank = jnp.sum(logits >= own, axis=-1, dtype=jnp.int32)
        tops, top_ids = jax.lax.cond(jnp.any(num_logprobs > 0), some_tops, no_tops)
        return TokenLogprobs((own - total)[:, 0], rank, sampling, top_ids, tops - total)

    def not_asked() -> TokenLogprobs:
        zeros = jnp.zeros(num_rows, jnp.float32)
        tops, top_ids = no_tops()
        return TokenLogprobs(zeros, jnp.zeros(num_rows, jnp.int32), zeros, top_ids, tops)

    return jax.lax.cond(jnp.any(num_logprobs >= 0), asked, not_asked)


def logprob_of(logits: Float32[jax.Array, "B V"], tokens: Int32[jax.Array, " B"]) -> Float32[jax.Array, " B"]:
    """Of each row's token, by the softmax of its logits."""
    own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return own - jax.nn.logsumexp(logits, axis=-1)
