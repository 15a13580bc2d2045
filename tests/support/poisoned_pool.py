"""Ragged rows over a page pool in which all that no row has written is NaN or infinite."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_LAYERS = 2
_POISON = (np.nan, np.inf, -np.inf)


@dataclass(frozen=True)
class PagedRows:
    """What `paged_attention` takes, as numpy; see there. num_tokens: tokens of real rows, those behind are padding."""

    q: np.ndarray
    kv_pages: np.ndarray
    page_table: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    page_offset: int
    num_tokens: int

    @property
    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.page_table, self.kv_lens, self.cu_q_lens


def poisoned_rows(
    q_lens: Sequence[int],
    cached_lens: Sequence[int],
    *,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_row_pads: int = 0,
    num_token_pads: int = 0,
    table_width: int | None = None,
    num_spare_pages: int = 3,
    num_pages: int | None = None,
    seed: int = 0,
) -> PagedRows:
    """Rows of `q_lens` new tokens after `cached_lens` cached ones, in pages of no order, the highest one among them.

    The pool has NUM_LAYERS layers, and the rows lie in the last. Padding rows come last and read the null page, which
    is poisoned as is every slot behind a row's end and every page of the other layer.
    """
    rng = np.random.default_rng(seed)
    kv_lens = np.add(q_lens, cached_lens).astype(np.int32)
    pages_per_row = -(-kv_lens // page_size)
    num_used = int(pages_per_row.sum())
    num_pages = num_pages or num_used + 1 + num_spare_pages
    width = 2 * num_kv_heads * head_dim
    kv_pages = rng.choice(_POISON, (NUM_LAYERS * num_pages, page_size, width)).astype(np.float32)
    chosen = np.append(num_pages - 1, rng.permutation(np.arange(1, num_pages - 1))[: num_used - 1]).astype(np.int32)
    page_offset = (NUM_LAYERS - 1) * num_pages
    page_table = np.zeros((len(q_lens) + num_row_pads, table_width or int(pages_per_row.max())), np.int32)
    taken = 0
    for row, (kv_len, num) in enumerate(zip(kv_lens, pages_per_row, strict=True)):
        pages = chosen[taken : taken + num]
        taken += num
        page_table[row, :num] = pages
        positions = np.arange(kv_len)
        slots = (pages[positions // page_size] + page_offset, positions % page_size)
        kv_pages[slots] = rng.standard_normal((kv_len, width))
    num_tokens = sum(q_lens)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens), [num_tokens] * num_row_pads]).astype(np.int32)
    return PagedRows(
        q=rng.standard_normal((num_tokens + num_token_pads, num_heads, head_dim)).astype(np.float32),
        kv_pages=kv_pages,
        page_table=page_table,
        kv_lens=np.append(kv_lens, np.zeros(num_row_pads, np.int32)),
        cu_q_lens=cu_q_lens,
        page_offset=page_offset,
        num_tokens=num_tokens,
    )
