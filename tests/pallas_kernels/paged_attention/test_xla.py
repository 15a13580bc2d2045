"""Paged attention in XLA against plain numpy in float64, over a pool in which whatever was not written is poison."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from poisoned_pool import PagedRows, poisoned_rows
from raggedness import HEAD_DIM, MAX_KV_LEN, Raggedness, raggedness

from radix_jax.check_kernel import run_case
from radix_jax.pallas_kernels.paged_attention import paged_attention
from radix_jax.pallas_kernels.paged_attention.oracle_grid import GRID, OracleCase
from radix_jax.pallas_kernels.paged_attention.reference import paged_attention_reference
from radix_jax.pallas_kernels.paged_attention.xla import BLOCK_LEN, Q_TILE_LEN, paged_attention_xla

FORMS = {"sequential": True, "vmapped": False}
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}
# Every pair of page size, head_dim and form of heads once.
SHAPES = [
    (page_size, head_dim, heads)
    for i, page_size in enumerate((1, 4, 16))
    for j, head_dim in enumerate((16, 64, 80))
    for k, heads in enumerate(HEADS)
    if (i + j + k) % 3 == 0
]
# (sequential, page size, head_dim, form of heads): vmapped, each page size, head_dim and form of heads once.
CASES = [*[(True, *shape) for shape in SHAPES], *[(False, *shape) for shape in SHAPES[::4]]]


def around(length: int) -> tuple[int, int, int]:
    return length - 1, length, length + 1


# Of every page size too: 15 to 17.
DECODE_KV_LENS = (1, 2, *around(16), *around(64), *around(BLOCK_LEN), *around(2 * BLOCK_LEN))
# (tokens to compute, tokens cached in front of them): whole prompts, a prompt's last token, and odd ones.
PREFILL_LENS = (
    *((q_len, 0) for q_len in (1, *around(Q_TILE_LEN), 2 * Q_TILE_LEN)),
    *((3, kv_len - 3) for kv_len in (*around(BLOCK_LEN), *around(2 * BLOCK_LEN))),
    *((Q_TILE_LEN + 1, 190), (64, 64), (1, 300), (65, 123), (2, 5)),
)
NUM_PREFILL_TOKENS = 512


def tolerance(dtype: object, head_dim: int, kv_len: int) -> float:
    """What rounding may move an output of values of about 1: dot products of head_dim terms and sums of kv_len ones,
    in float32 and independent of each other, and the result in `dtype`."""
    eps = float(np.finfo(np.float32).eps)
    return 4 * eps * (head_dim**0.5 + kv_len**0.5) + 4 * float(jnp.finfo(dtype).eps)


@functools.cache
def jitted(**static: object) -> Callable[..., jax.Array]:
    plain = {"sliding_window": None, "logit_soft_cap": None, "return_lse": False, "kv_scales": None}
    return jax.jit(functools.partial(paged_attention_xla, **plain, **static))


def attend(rows: PagedRows, *, sequential: bool, max_q_len: int, dtype: object = jnp.float32) -> np.ndarray:
    """The output for real tokens; the padding is proved to be finite."""
    scale = rows.q.shape[2] ** -0.5
    run = jitted(
        page_offset=rows.page_offset,
        scale=scale,
        num_kv_heads=rows.kv_pages.shape[2] // (2 * rows.q.shape[2]),
        max_q_len=max_q_len,
        sequential=sequential,
    )
    out = run(jnp.asarray(rows.q, dtype), jnp.asarray(rows.kv_pages, dtype), *map(jnp.asarray, rows.rows))
    assert out.dtype == dtype
    out = np.asarray(out, np.float64)
    assert out.shape == rows.q.shape
    assert np.isfinite(out).all()
    return out[: rows.num_tokens]


def expected(rows: PagedRows) -> np.ndarray:
    out = paged_attention_reference(
        rows.q.astype(np.float64),
        rows.kv_pages,
        *rows.rows,
        page_offset=rows.page_offset,
        scale=rows.q.shape[2] ** -0.5,
    )
    return out[: rows.num_tokens]


def test_vmapped_cases_cover_each_value_once() -> None:
    assert [len(set(values)) for values in zip(*SHAPES[::4], strict=True)] == [3, 3, 3]


@pytest.mark.parametrize(("sequential", "page_size", "head_dim", "heads"), CASES)
def test_decode(sequential: bool, page_size: int, head_dim: int, heads: str) -> None:
    num_heads, num_kv_heads = HEADS[heads]
    rows = poisoned_rows(
        [1] * len(DECODE_KV_LENS),
        [kv_len - 1 for kv_len in DECODE_KV_LENS],
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_row_pads=2,
        num_token_pads=2,
    )
    out = attend(rows, sequential=sequential, max_q_len=1)
    np.testing.assert_allclose(
        out, expected(rows), rtol=0, atol=tolerance(np.float32, head_dim, int(rows.kv_lens.max()))
    )


@pytest.mark.parametrize(("sequential", "page_size", "head_dim", "heads"), CASES)
def test_prefill(sequential: bool, page_size: int, head_dim: int, heads: str) -> None:
    num_heads, num_kv_heads = HEADS[heads]
    q_lens, cached_lens = zip(*PREFILL_LENS, strict=True)
    rows = poisoned_rows(
        q_lens,
        cached_lens,
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_row_pads=3,
        num_token_pads=NUM_PREFILL_TOKENS - sum(q_lens),
    )
    out = attend(rows, sequential=sequential, max_q_len=NUM_PREFILL_TOKENS)
    np.testing.assert_allclose(
        out, expected(rows), rtol=0, atol=tolerance(np.float32, head_dim, int(rows.kv_lens.max()))
    )


@pytest.mark.parametrize("max_q_len", [1, 40])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype: object, max_q_len: int) -> None:
    q_lens = [min(max_q_len, q_len) for q_len in (1, 7, 40)]
    rows = poisoned_rows(q_lens, [130, 0, 60], page_size=4, num_heads=4, num_kv_heads=2, head_dim=16)
    rounded = PagedRows(
        **{**vars(rows), **{name: rounded_to(getattr(rows, name), dtype) for name in ("q", "kv_pages")}}
    )
    out = attend(rounded, sequential=True, max_q_len=max_q_len, dtype=dtype)
    np.testing.assert_allclose(out, expected(rounded), rtol=0, atol=tolerance(dtype, 16, 131))


def rounded_to(values: np.ndarray, dtype: object) -> np.ndarray:
    """float32 values that `dtype` holds."""
    return np.asarray(jnp.asarray(values, dtype), np.float32)


@pytest.mark.parametrize("sequential", FORMS.values(), ids=FORMS.keys())
@settings(max_examples=40)
@given(lens=raggedness(num_rows=7, num_tokens=160))
def test_any_raggedness(sequential: bool, lens: Raggedness) -> None:
    rows = lens.rows(num_rows=7, num_tokens=160, num_heads=2)
    out = attend(rows, sequential=sequential, max_q_len=160)
    np.testing.assert_allclose(out, expected(rows), rtol=0, atol=tolerance(np.float32, HEAD_DIM, MAX_KV_LEN))


@pytest.mark.parametrize("max_q_len", [1, 3])
def test_a_wrong_page_shows(max_q_len: int) -> None:
    """The tolerance tells one wrong page of many from rounding."""
    rows = poisoned_rows(
        [min(max_q_len, 3)] * 2, [150, 90], page_size=4, num_heads=4, num_kv_heads=2, head_dim=16, num_spare_pages=0
    )
    right = expected(rows)
    rows.page_table[0, 20] = rows.page_table[1, 20]
    out = attend(rows, sequential=True, max_q_len=max_q_len)
    wrong_by = np.abs(out - right).reshape(2, -1).max(axis=1)
    assert wrong_by[0] > 100 * tolerance(np.float32, 16, 153)
    assert wrong_by[1] < tolerance(np.float32, 16, 153)


def test_the_reference_is_softmax_attention() -> None:
    """By hand: one head of two lanes, whose weights are 1/4 and 3/4."""
    kv_pages = np.zeros((3, 1, 4))
    kv_pages[1, 0] = [0.0, 0.0, 8.0, 0.0]
    kv_pages[2, 0] = [np.log(3.0), 0.0, 0.0, 4.0]
    out = paged_attention_reference(
        np.array([[[2.0, 5.0]], [[2.0, 5.0]]]),
        kv_pages,
        np.array([[1, 2]], np.int32),
        np.array([2], np.int32),
        np.array([0, 2], np.int32),
        page_offset=0,
        scale=0.5,
    )
    np.testing.assert_allclose(out[0, 0], [8.0, 0.0], rtol=1e-15)
    np.testing.assert_allclose(out[1, 0], [2.0, 3.0], rtol=1e-15)


VMAPPED_CASES = [
    case
    for case in GRID
    if case.name in ("mixed-rounded-width", "decode-rounded-width", "decode-more-tokens-than-rows", "decode-window-50")
    or case.name in ("mixed-lse-window-and-soft-cap", "mixed-float8_e4m3fn", "decode-lse", "cached-prefix-window-16")
]


@pytest.mark.parametrize("case", VMAPPED_CASES, ids=lambda case: case.name)
def test_options_of_the_vmapped_form(case: OracleCase) -> None:
    """The grid runs through the form of the platform at hand, which is the other one."""
    result = run_case("vmapped", functools.partial(paged_attention_xla, sequential=False), case)
    assert result.status == "ok", result


def test_the_form_is_that_of_the_platform_that_is_lowered_for() -> None:
    """On a CPU tile after tile; elsewhere all at once. Nothing is chosen when it runs."""
    assert len(VMAPPED_CASES) == 8
    rows = poisoned_rows([5, 1], [2, 6], page_size=4, num_heads=4, num_kv_heads=2, head_dim=8)
    operands = (jnp.asarray(rows.q), jnp.asarray(rows.kv_pages), *map(jnp.asarray, rows.rows))
    options = {"page_offset": rows.page_offset, "scale": 0.3, "num_kv_heads": 2, "max_q_len": 6}

    def num_loops(platform: str, sequential: bool | None) -> int:
        lowered = jitted(**options, sequential=sequential).trace(*operands).lower(lowering_platforms=(platform,))
        return lowered.as_text().count("stablehlo.while")

    assert num_loops("cpu", None) == num_loops("cpu", True)
    assert num_loops("cuda", None) == num_loops("tpu", None) == num_loops("cpu", False)
    assert num_loops("cpu", None) > num_loops("cuda", None)
    compiled = jitted(**options, sequential=None).lower(*operands).compile().as_text()
    assert " while(" in compiled
    assert " conditional(" not in compiled


@pytest.mark.parametrize("max_q_len", [1, 3])
def test_work_starts_with_the_window(max_q_len: int) -> None:
    """What no query sees is not even read: NaN in front of the window's first block reaches nothing."""
    lens = [min(max_q_len, 3)] * 2
    rows = poisoned_rows(lens, [3 * BLOCK_LEN, 5], page_size=16, num_heads=4, num_kv_heads=2, head_dim=16)
    num_unseen = 2 * BLOCK_LEN // 16
    rows.kv_pages[rows.page_table[0, :num_unseen] + rows.page_offset] = np.nan
    case = {"sliding_window": BLOCK_LEN // 2, "num_kv_heads": 2, "max_q_len": max_q_len}
    out = paged_attention(
        jnp.asarray(rows.q),
        jnp.asarray(rows.kv_pages),
        *map(jnp.asarray, rows.rows),
        page_offset=rows.page_offset,
        scale=0.25,
        backend="xla",
        **case,
    )
    assert np.isfinite(out).all()
