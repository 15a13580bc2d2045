"""Greedy generation with nothing but init_kv, prefill and decode: no engine, no scheduler, no cache."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np

from radix_jax.arrays import StepInputs
from radix_jax.functional import decode, init_kv, prefill
from radix_jax.models.base import ModelParams

PAGE_SIZE = 16


def generate(params: ModelParams, prompt: np.ndarray, num_tokens: int) -> list[int]:
    """The `num_tokens` most likely tokens after `prompt` (int32 [T]), one after the other."""
    num_pages = -(-(len(prompt) + num_tokens) // PAGE_SIZE)
    kv = init_kv(params.config, num_pages + 1, PAGE_SIZE)  # page 0 is the null page
    pages = np.arange(1, num_pages + 1, dtype=np.int32)
    prefill_step, decode_step = (jax.jit(step, donate_argnums=1) for step in (prefill, decode))

    kv, logits = prefill_step(params, kv, one_row(prompt, 0, pages))
    output = [int(logits[0].argmax())]
    while len(output) < num_tokens:
        last = np.array(output[-1:], np.int32)
        kv, logits = decode_step(params, kv, one_row(last, len(prompt) + len(output) - 1, pages))
        output.append(int(logits[0].argmax()))
    return output


def one_row(token_ids: np.ndarray, start: int, pages: np.ndarray) -> StepInputs:
    """A step of one request: `token_ids` at positions start, start + 1, ... of the sequence that lies in `pages`."""
    positions = np.arange(start, start + len(token_ids), dtype=np.int32)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        page_table=pages[None],
        kv_lens=np.array([start + len(token_ids)], np.int32),
        cu_q_lens=np.array([0, len(token_ids)], np.int32),
        write_slots=pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
    )


def export_step(
    step: Callable[..., Any], params: ModelParams, kv: jax.Array, inputs: StepInputs
) -> jax.export.Exported:
    """`prefill` or `decode` for these shapes as a program that takes the leaves of its arguments, flat: nothing of
    radix_jax is needed to call it."""
    leaves, structure = jax.tree.flatten((params, kv, inputs))
    return jax.export.export(jax.jit(lambda *leaves: step(*jax.tree.unflatten(structure, leaves))))(*leaves)
