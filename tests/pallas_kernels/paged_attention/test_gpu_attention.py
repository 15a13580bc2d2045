"""The GPU attention kernels, interpreted on the CPU, against numpy in float64: all not written is poison."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from poisoned_pool import PagedRows, poisoned_rows
from raggedness import HEAD_DIM, PAGE_SIZE, Raggedness, raggedness

from radix_jax.pallas_kernels.paged_attention.gpu import paged_attention_gpu
from radix_jax.pallas_kernels.paged_attention.gpu_blocks import DecodeBlocks, ExtendBlocks, GpuBlocks
from radix_jax.pallas_kernels.paged_attention.reference import paged_attention_reference

# Where blocks of 16, 32 and 64 tokens end, and one split among many.
DECODE_KV_LENS = (1, 2, 15, 16, 17, 63, 64, 65, 200)
# (tokens to compute, tokens cached in front of them); rows of one token go through decode.
MIXED_LENS = ((5, 100), (1, 40), (70, 0), (1, 0), (33, 63), (2, 128), (1, 129))
EXTEND_LENS = ((64, 0), (3, 61), (21, 300), (2, 0))
SMALL_BLOCKS = GpuBlocks(DecodeBlocks(16, 3, 4, 2), ExtendBlocks(32, 16, 4, 2))


@dataclass(frozen=True)
class Case:
    """One shape and one set of options. lens: what the rows compute, and have cached."""

    kind: str
    page_size: int
    head_dim: int
    heads: tuple[int, int]
    dtype: Any = jnp.float32
    pool_dtype: Any = None
    window: int | None = None
    cap: float | None = None

    @property
    def lens(self) -> tuple[tuple[int, int], ...]:
        if self.kind == "decode":
            return tuple((1, kv_len - 1) for kv_len in DECODE_KV_LENS)
        return MIXED_LENS if self.kind == "mixed" else EXTEND_LENS


BF16, F16, F32, E4M3, E5M2 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
CASES = [
    Case("decode", 16, 128, (8, 2)),
    Case("decode", 1, 64, (2, 2), BF16, window=33),
    Case("decode", 64, 80, (6, 2), cap=3.0),
    Case("decode", 16, 96, (16, 1), F16, window=7),
    Case("decode", 1, 256, (4, 2), BF16, E4M3),
    Case("decode", 64, 64, (5, 1), F32, E5M2, window=64, cap=3.0),
    Case("extend", 16, 64, (4, 2), window=16),
    Case("extend", 64, 128, (3, 1), BF16, window=64, cap=3.0),
    Case("extend", 1, 80, (2, 2)),
    Case("extend", 16, 256, (2, 1), F16),
    Case("extend", 64, 96, (16, 1), window=1),
    Case("extend", 1, 64, (8, 1), F16, E5M2, cap=3.0),
    Case("mixed", 16, 128, (4, 1), BF16, window=1000, cap=3.0),
    Case("mixed", 1, 96, (6, 2), F32, E4M3),
    Case("mixed", 64, 80, (7, 1), F16, window=17),
    Case("mixed", 16, 64, (2, 1), F32, BF16, window=15),
    Case("mixed", 64, 256, (2, 2), BF16),
]


def test_cases_cover_each_value_for_each_kind() -> None:
    assert {case.head_dim for case in CASES} == {64, 80, 96, 128, 256}
    assert {case.heads[0] // case.heads[1] for case in CASES} >= {1, 2, 3, 4, 7, 8, 16}
    for kind in ("decode", "extend", "mixed"):
        cases = [case for case in CASES if case.kind == kind]
        assert {case.page_size for case in cases} == {1, 16, 64}
        assert {case.dtype for case in cases} == {BF16, F16, F32}
        assert any(case.pool_dtype in (E4M3, E5M2) for case in cases)
        assert {case.window is None for case in cases} == {case.cap is None for case in cases} == {True, False}


def tolerance(dtype: Any, head_dim: int, kv_len: int) -> float:
    """What rounding may move an output of values of about 1: dot products of head_dim terms and sums of kv_len ones,
    in float32 and independent of each other, and weights and the result in `dtype`."""
    eps = float(np.finfo(np.float32).eps)
    return 4 * eps * (head_dim**0.5 + kv_len**0.5) + 4 * float(jnp.finfo(dtype).eps)


@functools.cache
def jitted(**static: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(paged_attention_gpu, interpret=True, return_lse=True, **static))


def rows_of(case: Case, *, seed: int = 0) -> PagedRows:
    """Poisoned rows of the case's shape, in values that its dtypes hold."""
    q_lens, cached_lens = zip(*case.lens, strict=True)
    rows = poisoned_rows(
        q_lens,
        cached_lens,
        page_size=case.page_size,
        num_heads=case.heads[0],
        num_kv_heads=case.heads[1],
        head_dim=case.head_dim,
        num_row_pads=2,
        num_token_pads=5,
        seed=seed,
    )
    pool_dtype = case.pool_dtype or case.dtype
    return replace(rows, q=rounded_to(rows.q, case.dtype), kv_pages=rounded_to(rows.kv_pages, pool_dtype))


def rounded_to(values: np.ndarray, dtype: Any) -> np.ndarray:
    """float32 values that `dtype` holds."""
    return np.asarray(jnp.asarray(values, dtype), np.float32)


def attend(
    case: Case, rows: PagedRows, *, blocks: GpuBlocks | None = None, kv_scales: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of all tokens."""
    run = jitted(
        scale=case.head_dim**-0.5,
        sliding_window=case.window,
        logit_soft_cap=case.cap,
        num_kv_heads=case.heads[1],
        max_q_len=1 if case.kind == "decode" else len(rows.q),
        blocks=blocks,
    )
    out, lse = run(
        jnp.asarray(rows.q, case.dtype),
        jnp.asarray(rows.kv_pages, case.pool_dtype or case.dtype),
        *map(jnp.asarray, rows.rows),
        page_offset=jnp.asarray(rows.page_offset, jnp.int32),
        kv_scales=None if kv_scales is None else jnp.asarray(kv_scales),
    )
    assert out.dtype == case.dtype
    assert lse.dtype == jnp.float32
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def expected(case: Case, rows: PagedRows, kv_scales: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    out = paged_attention_reference(
        rows.q.astype(np.float64),
        rows.kv_pages,
        *rows.rows,
        page_offset=rows.page_offset,
        scale=case.head_dim**-0.5,
        sliding_window=case.window,
        logit_soft_cap=case.cap,
        return_lse=True,
        num_kv_heads=case.heads[1],
        kv_scales=kv_scales,
    )
    assert isinstance(out, tuple)
    return out


def assert_same(case: Case, rows: PagedRows, got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, ...]) -> None:
    """Real tokens within what rounding may do; tokens of no row exactly 0 and -inf."""
    longest = int(rows.kv_lens.max())
    real = rows.num_tokens
    np.testing.assert_allclose(
        got[0][:real], want[0][:real], rtol=0, atol=tolerance(case.dtype, case.head_dim, longest)
    )
    np.testing.assert_allclose(got[1][:real], want[1][:real], rtol=0, atol=tolerance(F32, case.head_dim, longest))
    assert (got[0][real:] == 0.0).all()
    assert (got[1][real:] == -np.inf).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case: Case) -> None:
    rows = rows_of(case)
    is_float8 = case.pool_dtype in (E4M3, E5M2)
    kv_scales = np.linspace(0.5, 1.5, 2 * case.heads[1], dtype=np.float32).reshape(-1, 2) if is_float8 else None
    assert_same(case, rows, attend(case, rows, kv_scales=kv_scales), expected(case, rows, kv_scales))


@pytest.mark.parametrize("window", [1, 5, 15, 16, 17, 31, 32, 33, 48, 130])
def test_windows_at_the_borders_of_blocks(window: int) -> None:
    case = Case("mixed", 4, 16, (3, 1), window=window)
    rows = rows_of(case)
    assert_same(case, rows, attend(case, rows, blocks=SMALL_BLOCKS), expected(case, rows))


@pytest.mark.parametrize("num_splits", [1, 2, 8, 40])
def test_any_number_of_splits(num_splits: int) -> None:
    """More splits than a row has blocks, and than combine takes at a time, too."""
    case = Case("decode", 4, 16, (3, 1))
    rows = rows_of(case)
    blocks = GpuBlocks(DecodeBlocks(16, num_splits, 4, 2), SMALL_BLOCKS.extend)
    assert_same(case, rows, attend(case, rows, blocks=blocks), expected(case, rows))


def test_lanes_past_the_heads_are_not_read() -> None:
    case = Case("mixed", 4, 16, (2, 1))
    rows = rows_of(case)
    padding = np.full((*rows.kv_pages.shape[:2], 96), np.nan, np.float32)
    wide = replace(rows, kv_pages=np.concatenate([rows.kv_pages, padding], axis=-1))
    assert_same(case, wide, attend(case, wide, blocks=SMALL_BLOCKS), expected(case, rows))


@pytest.mark.parametrize("page_id", [-1, 2**31 - 1])
def test_page_ids_past_a_row_are_not_read(page_id: int) -> None:
    case = Case("mixed", 4, 16, (2, 1))
    rows = rows_of(case)
    table = rows.page_table.copy()
    for row, kv_len in enumerate(rows.kv_lens):
        table[row, -(-kv_len // case.page_size) :] = page_id
    odd = replace(rows, page_table=table)
    assert_same(case, odd, attend(case, odd, blocks=SMALL_BLOCKS), expected(case, rows))


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_wrong_page_shows(kind: str) -> None:
    """The tolerance tells one wrong page of many from rounding, and only its row is wrong."""
    case = Case(kind, 4, 16, (2, 1))
    rows = rows_of(case)
    row = int(rows.kv_lens.argmax())
    want = expected(case, rows)[0]
    other = int(np.argsort(rows.kv_lens)[-2])
    rows.page_table[row, 7] = rows.page_table[other, 7]
    error = np.abs(attend(case, rows, blocks=SMALL_BLOCKS)[0] - want).max(axis=(1, 2))
    own = np.arange(len(error))
    is_own = (own >= rows.cu_q_lens[row]) & (own < rows.cu_q_lens[row + 1])
    assert error[is_own].min() > 20 * tolerance(F32, 16, 321)
    assert error[~is_own].max() < tolerance(F32, 16, 321)


def test_decode_with_more_tokens_than_rows() -> None:
    """A decode step may have any padding, in the middle too: rows without a query."""
    case = Case("decode", 4, 16, (2, 1))
    rows = rows_of(case)
    cu_q_lens = np.concatenate([rows.cu_q_lens[:4], rows.cu_q_lens[3:]]).astype(np.int32)
    idle = replace(
        rows,
        page_table=np.insert(rows.page_table, 3, 0, axis=0),
        kv_lens=np.insert(rows.kv_lens, 3, 0).astype(np.int32),
        cu_q_lens=cu_q_lens,
    )
    assert_same(case, idle, attend(case, idle, blocks=SMALL_BLOCKS), expected(case, rows))


def test_no_rows_at_all() -> None:
    """What a warm-up step is: padding only."""
    for kind in ("decode", "mixed"):
        case = Case(kind, 4, 16, (2, 1))
        rows = rows_of(case)
        idle = replace(rows, kv_lens=rows.kv_lens * 0, cu_q_lens=rows.cu_q_lens * 0, num_tokens=0)
        assert_same(case, idle, attend(case, idle, blocks=SMALL_BLOCKS), expected(case, idle))


@settings(max_examples=30)
@given(lens=raggedness(num_rows=6, num_tokens=120))
def test_any_raggedness(lens: Raggedness) -> None:
    rows = lens.rows(num_rows=6, num_tokens=120, num_heads=3)
    case = Case("mixed", PAGE_SIZE, HEAD_DIM, (3, 1), window=37)
    assert_same(case, rows, attend(case, rows, blocks=SMALL_BLOCKS), expected(case, rows))


def test_a_pool_that_32_bits_do_not_address_is_refused() -> None:
    """1-byte elements from 2 to 4 GiB; either side of it is fine."""

    def shape_of(num_pages: int, dtype: Any) -> Any:
        pool = jax.ShapeDtypeStruct((num_pages, 16, 2 * 8 * 128), dtype)
        arrays = (
            jax.ShapeDtypeStruct((4, 32, 128), BF16),
            pool,
            jax.ShapeDtypeStruct((4, 8), jnp.int32),
            jax.ShapeDtypeStruct((4,), jnp.int32),
            jax.ShapeDtypeStruct((5,), jnp.int32),
        )
        static = {"scale": 1.0, "sliding_window": None, "logit_soft_cap": None, "num_kv_heads": 8, "max_q_len": 1}
        return jax.eval_shape(functools.partial(jitted(**static), page_offset=0, kv_scales=None), *arrays)

    pages_of_2_gib = 2**31 // (16 * 2048)
    with pytest.raises(ValueError, match=r"the KV pool of 2147516416 bytes .* take fewer or more pages"):
        shape_of(pages_of_2_gib + 1, E4M3)
    with pytest.raises(ValueError, match="take fewer or more pages"):
        shape_of(2 * pages_of_2_gib, E4M3)
    for num_pages, dtype in ((pages_of_2_gib, E4M3), (2 * pages_of_2_gib + 1, E4M3), (pages_of_2_gib + 1, BF16)):
        assert shape_of(num_pages, dtype)[0].shape == (4, 32, 128)
