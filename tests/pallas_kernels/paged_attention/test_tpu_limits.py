"""How long rows may be on a TPU: the words of the real work lists, of shapes alone."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from radix_jax.pallas_kernels.paged_attention.backends import UnsupportedOption
from radix_jax.pallas_kernels.paged_attention.tpu_decode import spec_of
from radix_jax.pallas_kernels.paged_attention.tpu_extend import extend_spec_of
from radix_jax.pallas_kernels.paged_attention.tpu_extend_work import extend_work
from radix_jax.pallas_kernels.paged_attention.tpu_limits import max_row_len
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import ASSUMED_CHIP, CHIPS, SMEM_WORDS, TpuChip
from radix_jax.pallas_kernels.paged_attention.tpu_work import decode_work


def shapes(heads: tuple[int, int, int], num_tokens: int, page_size: int) -> tuple[Any, Any]:
    num_heads, num_kv_heads, head_dim = heads
    q = jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), jnp.bfloat16)
    return q, jax.ShapeDtypeStruct((9, page_size, 2 * num_kv_heads * head_dim), jnp.bfloat16)


def scalar_words(q: Any, kv_pages: Any, num_rows: int, num_pages: int, num_kv_heads: int, chip: TpuChip) -> list[int]:
    """Of a decode step and of one that extends, tables of `num_pages` pages a row included."""
    options: dict[str, Any] = {"num_kv_heads": num_kv_heads, "sliding_window": None, "logit_soft_cap": None}
    options |= {"return_lse": False, "chip": chip}
    decode = spec_of(q, kv_pages, num_pages, is_scaled=False, writes=True, **options)
    extend = extend_spec_of(q, kv_pages, num_pages, max_q_len=q.shape[0], **options)
    lens, cu_q_lens = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (num_rows, num_rows + 1))
    lists = [
        jax.eval_shape(
            lambda lens, cu_q_lens: decode_work(
                lens,
                cu_q_lens,
                table_len=num_pages * kv_pages.shape[1],
                tile_len=decode.tiles.tile_len,
                num_spare=decode.tiles.num_buffers,
            ),
            lens,
            cu_q_lens,
        ),
        jax.eval_shape(lambda *rows: extend_work(extend, *rows, num_tokens=q.shape[0])[0], lens, cu_q_lens),
    ]
    padded_table = num_rows * num_pages + max(decode.shape.num_copies, extend.shape.num_copies)
    return [sum(x.size for x in jax.tree.leaves(one)) + padded_table + 1 for one in lists]


@pytest.mark.parametrize("heads", [(32, 8, 128), (128, 8, 128), (16, 16, 256), (71, 1, 64)])
@pytest.mark.parametrize(
    ("num_rows", "page_size", "num_tokens"),
    [(8, 8, 64), (64, 16, 2048), (64, 16, 16384), (128, 64, 8192), (512, 16, 2048), (4096, 64, 64)],
)
def test_the_longest_rows_fill_scalar_memory(
    heads: tuple[int, int, int], num_rows: int, page_size: int, num_tokens: int
) -> None:
    q, kv_pages = shapes(heads, num_tokens, page_size)
    num_pages, rest = divmod(max_row_len(q, kv_pages, num_rows, num_kv_heads=heads[1]), page_size)
    assert num_pages > 0
    assert not rest
    for chip in CHIPS.values():
        assert max(scalar_words(q, kv_pages, num_rows, num_pages, heads[1], chip)) <= SMEM_WORDS
    # A row and a q tile more or less do not matter, an eighth more does.
    assert max(scalar_words(q, kv_pages, num_rows, num_pages * 9 // 8 + 1, heads[1], ASSUMED_CHIP)) > SMEM_WORDS


def test_more_rows_than_there_is_room_for() -> None:
    q, kv_pages = shapes((32, 8, 128), 2048, 16)
    assert max_row_len(q, kv_pages, 1 << 15, num_kv_heads=8) == 0


def test_heads_and_pages_that_the_kernels_cannot_do() -> None:
    q, kv_pages = shapes((128, 128, 256), 64, 16)
    with pytest.raises(UnsupportedOption, match="VMEM"):
        max_row_len(q, kv_pages, 8, num_kv_heads=128)
    q, kv_pages = shapes((4, 2, 64), 64, 24)
    with pytest.raises(UnsupportedOption, match="page_size"):
        max_row_len(q, kv_pages, 8, num_kv_heads=2)
