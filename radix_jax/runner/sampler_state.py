"""SamplerState: its rows, and what penalties, bias and min_tokens make of logits by them."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32

from radix_jax.arrays import Array, SamplerState, SamplingInputs
from radix_jax.plan import StepRow

# Bits of SamplerState.tokens.
_COUNT = 2**29 - 1
_ENDS = 2**29
_IN_PROMPT = 2**30


class SamplerRow(NamedTuple):
    """What one row of SamplerState becomes."""

    seat: Int32[Array, ""]
    tokens: Int32[Array, " V"]
    bias: Float32[Array, " V"]


def empty_sampler_state(num_seats: int, vocab_size: int) -> SamplerState:
    """Rows that change nothing."""
    shape = num_seats, vocab_size
    return SamplerState(tokens=jnp.zeros(shape, jnp.int32), bias=jnp.zeros(shape, jnp.float32))


def sampler_state_bytes(num_seats: int, vocab_size: int) -> int:
    """Bytes of such a state."""
    return num_seats * vocab_size * (np.dtype(np.int32).itemsize + np.dtype(np.float32).itemsize)


def empty_sampler_row(vocab_size: int) -> SamplerRow:
    """A row that changes nothing."""
    return SamplerRow(np.zeros((), np.int32), np.zeros(vocab_size, np.int32), np.zeros(vocab_size, np.float32))


def needs_sampler_row(row: StepRow) -> bool:
    """Whether a row of a plan that ends a prompt asks for what lies in SamplerState from now on."""
    return row.samples and (row.request.adjusts_logits or row.request.min_len > 0)


def sampler_row(row: StepRow, vocab_size: int) -> SamplerRow:
    """The request of a row that ends a prompt: its prompt, its output so far, its stop ids and bias."""
    request = row.request
    seat, tokens, bias = empty_sampler_row(vocab_size)
    seat[...] = row.seat
    tokens += np.bincount(row.output_ids, minlength=vocab_size).astype(np.int32)
    tokens[request.token_ids] |= _IN_PROMPT
    tokens[[token_id for token_id in request.stop_ids if token_id < vocab_size]] |= _ENDS
    for token_id, value in (request.sampling.logit_bias or {}).items():
        bias[token_id] = value
    return SamplerRow(seat, tokens, bias)


def fill_sampler_row(state: SamplerState, row: SamplerRow) -> SamplerState:
    """The state with one row anew. The engine donates `state`."""
    return SamplerState(tokens=state.tokens.at[row.seat].set(row.tokens), bias=state.bias.at[row.seat].set(row.bias))


def reads_state(rows: SamplingInputs) -> Bool[jax.Array, " B"]:
    """Rows whose logits `adjust` changes."""
    return (jnp.asarray(rows.adjusts) != 0) | (jnp.asarray(rows.position) < jnp.asarray(rows.min_len))


def adjust(logits: Float32[jax.Array, "B V"], rows: SamplingInputs, state: SamplerState) -> Float32[jax.Array, "B V"]:
    """`logits` after bias, min_tokens and penalties, in the order of vLLM; rows that ask for none as they are."""
    seats = jnp.asarray(rows.seat)
    held = state.tokens[seats]
    count = held & _COUNT
    adjusted = logits + state.bias[seats]
    is_early = _column(rows.position) < _column(rows.min_len)
    adjusted = jnp.where(is_early & ((held & _ENDS) != 0), -jnp.inf, adjusted)
    repetition = _column(rows.repetition_penalty)
    penalised = jnp.where(adjusted > 0, adjusted / repetition, adjusted * repetition)
    adjusted = jnp.where((held & (_COUNT | _IN_PROMPT)) != 0, penalised, adjusted)
    adjusted -= _column(rows.frequency_penalty) * count.astype(jnp.float32)
    adjusted -= jnp.where(count > 0, _column(rows.presence_penalty), 0.0)
    return jnp.where(reads_state(rows)[:, None], adjusted, logits)


def count_tokens(state: SamplerState, rows: SamplingInputs, tokens: Int32[jax.Array, " B"]) -> SamplerState:
    """The state once each row's token is in its output; only rows that read counts keep them."""
    seats = jnp.where(jnp.asarray(rows.adjusts) != 0, jnp.asarray(rows.seat), state.tokens.shape[0])
    return dataclasses.replace(state, tokens=state.tokens.at[seats, tokens].add(1, mode="drop"))


def _column(values: Array) -> jax.Array:
    return jnp.asarray(values)[:, None]
