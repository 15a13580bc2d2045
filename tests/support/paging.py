"""Drives the functional core by hand: one sequence through a paged pool, in chunks, without scheduler and cache."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from radix_jax.arrays import StepInputs

# Uneven, with chunks of one token as decode has them, and longer than a page for every page size tried.
CHUNK_LENS = (7, 1, 16, 1, 1, 33)


def chunks(num_tokens: int, chunk_lens: Sequence[int] = CHUNK_LENS) -> Iterator[tuple[int, int]]:
    """(start, end) of each chunk until `num_tokens` are covered; the lengths repeat."""
    start, turn = 0, 0
    while start < num_tokens:
        end = min(start + chunk_lens[turn % len(chunk_lens)], num_tokens)
        yield start, end
        start, turn = end, turn + 1


def shuffled_pages(num_tokens: int, page_size: int, num_pages: int, seed: int = 0) -> np.ndarray:
    """Page ids for a sequence, int32, in no order, the null page 0 not among them."""
    needed = -(-num_tokens // page_size)
    return np.random.default_rng(seed).permutation(np.arange(1, num_pages))[:needed].astype(np.int32)


def row_inputs(token_ids: np.ndarray, start: int, end: int, pages: np.ndarray, kv: Any, pad_to: int) -> StepInputs:
    """A step of one real row, tokens [start, end) of the sequence, and one padding row, on `pad_to` token places."""
    page_size = kv.shape[1]
    num_tokens = end - start
    positions = np.arange(start, end, dtype=np.int32)
    write_slots = kv.shape[0] * page_size + np.arange(pad_to, dtype=np.int32)
    write_slots[:num_tokens] = pages[positions // page_size] * page_size + positions % page_size
    used = -(-end // page_size)
    page_table = np.zeros((2, len(pages)), np.int32)
    page_table[0, :used] = pages[:used]
    return StepInputs(
        token_ids=_padded(token_ids[start:end], pad_to),
        positions=_padded(positions, pad_to),
        page_table=page_table,
        kv_lens=np.array([end, 0], np.int32),
        cu_q_lens=np.array([0, num_tokens, num_tokens], np.int32),
        write_slots=write_slots,
    )


def chunked_logits(step: Callable[..., Any], kv: Any, token_ids: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Logits of every position, float32 [T, V], each computed in a chunk over the KV that earlier chunks left.

    step: (kv, inputs) -> (kv, logits [B, V]), which does not donate kv. A step gives the logits of its last token, so
    each chunk is run once for every place in it, from the same pool; the whole chunk's pool goes on.
    """
    rows = []
    for start, end in chunks(len(token_ids)):
        before = kv
        for last in range(start, end):
            kv, logits = step(before, row_inputs(token_ids, start, last + 1, pages, kv, max(CHUNK_LENS)))
            rows.append(np.asarray(logits)[0])
    return np.stack(rows)


def decoded_logits(step: Callable[..., Any], kv: Any, token_ids: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Logits of every position, float32 [T, V], one token a step: T places hold one token of each of B rows."""
    rows = []
    for place in range(len(token_ids)):
        kv, logits = step(kv, row_inputs(token_ids, place, place + 1, pages, kv, pad_to=2))
        rows.append(np.asarray(logits)[0])
    return np.stack(rows)


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    out = np.zeros(length, np.int32)
    out[: len(values)] = values
    return out
