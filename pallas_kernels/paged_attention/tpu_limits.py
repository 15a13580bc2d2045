"""How long a row may be on a TPU, where page table and work list of every step lie in scalar memory."""

from typing import Any

from radix_jax.pallas_kernels.paged_attention.tpu_decode import spec_of
from radix_jax.pallas_kernels.paged_attention.tpu_extend import extend_spec_of
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import ASSUMED_CHIP, SMEM_WORDS, check_pool

# Of a work list, beside an item for each KV tile: words of a row or a q tile, its last and partial KV tile among them,
# and those of no row.
WORDS_OF_ROW = 8
WORDS_BESIDE = 128


def max_row_len(q: Any, kv_pages: Any, num_rows: int, *, num_kv_heads: int) -> int:
    """Tokens of a row, whole pages, for which all of a step fits on any chip: of a decode step of `num_rows` rows, and
    of one that extends as many rows by the tokens of q; 0 where there is no room for so many rows.

    q [T, N, H], kv_pages [L * P, K, W]: arrays, or their shapes and dtypes.

    Raises:
        UnsupportedOption: pages or heads that the kernels can't do.
    """
    num_tokens, page_size = q.shape[0], kv_pages.shape[1]
    check_pool(page_size, kv_pages.shape[2], kv_pages.dtype)
    options: dict[str, Any] = {
        "num_kv_heads": num_kv_heads,
        "sliding_window": None,
        "logit_soft_cap": None,
        "return_lse": False,
        "chip": ASSUMED_CHIP,
    }
    # Tiles are shorter for short tables alone.
    decode = spec_of(q, kv_pages, SMEM_WORDS, is_scaled=False, writes=True, **options).tiles
    extend = extend_spec_of(q, kv_pages, SMEM_WORDS, max_q_len=num_tokens, **options).tiles
    num_q_tiles = num_tokens // extend.tokens + num_rows + 1
    return page_size * min(
        _num_pages(num_rows, num_rows, page_size, decode.tile_len),
        _num_pages(num_rows, num_q_tiles, page_size, extend.tile_len),
    )


def _num_pages(num_rows: int, num_q_tiles: int, page_size: int, tile_len: int) -> int:
    """Pages of a row for which a table of `num_rows` rows and the items of `num_q_tiles` fit."""
    words = max(0, SMEM_WORDS - WORDS_OF_ROW * num_q_tiles - WORDS_BESIDE)
    return words * tile_len // (num_rows * tile_len + num_q_tiles * page_size)
