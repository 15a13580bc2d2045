"""The TPU extend kernel, interpreted on the CPU: VMEM starts as NaN, what no row wrote is poison, races are found."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_interpreter import INTERPRET, assert_no_race

from radix_jax.pallas_kernels.paged_attention.backends import UnsupportedOption
from radix_jax.pallas_kernels.paged_attention.oracle_grid import (
    GRID,
    OracleCase,
    PagedRows,
    case_inputs,
    expected,
    tolerance,
)
from radix_jax.pallas_kernels.paged_attention.tpu_extend import paged_attention_extend
from radix_jax.pallas_kernels.paged_attention.tpu_extend_work import (
    VMEM_BUDGET_BYTES,
    ExtendSpec,
    choose_extend_tiles,
    extend_work,
    vmem_arrays,
)
from radix_jax.pallas_kernels.paged_attention.tpu_heads import HeadLayout
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import (
    CHIPS,
    MIB,
    VMEM_MARGIN_BYTES,
    TpuChip,
    vmem_array_bytes,
)

SMALL_CHIP = TpuChip(3 * MIB, 3)
# Rows over several tiles either way; rows that end and begin at tiles' ends; single queries between them.
LONG = ((90, 170), (1, 300), (34, 350), (64, 64), (2, 0), (1, 0), (33, 95))
# Between them: bfloat16, an odd number of heads, lanes in two groups and spare ones, 1 to 8 query heads on a kv head, a
# window shorter than a tile and one longer, a soft cap, log sums, float8 with scales, pages longer than a tile.
CASES = (
    OracleCase("bfloat16-window", LONG, num_heads=3, num_kv_heads=1, dtype="bfloat16", sliding_window=60),
    OracleCase("two-lane-groups", LONG, num_heads=3, num_kv_heads=3, head_dim=80, spare_lanes=32, return_lse=True),
)
LARGE_CASES = (
    OracleCase("large-pages", LONG, page_size=256, num_heads=8, num_kv_heads=1, head_dim=128, sliding_window=140),
    OracleCase("soft-cap", LONG, num_heads=4, num_kv_heads=2, head_dim=96, spare_lanes=0, logit_soft_cap=5.0),
    OracleCase("traced", LONG, num_heads=2, num_kv_heads=2, dtype="bfloat16", traced_offset=True, return_lse=True),
    OracleCase(
        "float8",
        LONG,
        page_size=32,
        num_heads=4,
        dtype="bfloat16",
        pool_dtype="float8_e4m3fn",
        scaled=True,
        head_dim=128,
    ),
)


def on_tpu(case: OracleCase) -> OracleCase:
    """The case with the pool a TPU needs: whole groups of lanes, pages of at least a tile's rows, no float16."""
    width = 2 * case.num_kv_heads * case.head_dim + case.spare_lanes
    page_size = 32 if "float8" in (case.pool_dtype or "") else max(case.page_size, 8)
    num_pages = None if case.num_pages is None else 1000
    spare_lanes = case.spare_lanes - width % -128
    pool_dtype = "float32" if case.dtype == "float16" else case.pool_dtype
    return replace(case, spare_lanes=spare_lanes, page_size=page_size, num_pages=num_pages, pool_dtype=pool_dtype)


# The rest of the grid takes minutes. These have between them: a window, a soft cap, log sums, heads of 64 to 256, up to
# 16 query heads on a kv head, each dtype, a traced offset, two lengths of pages.
SLOW = (
    "traced",
    "float8",
    "mixed-lse-window-and-soft-cap",
    "cached-prefix-head-dim-96",
    "cached-prefix-head-dim-256",
    "mixed-16-heads-on-1",
    "mixed-float16",
    "mixed-float8_e5m2",
    "mixed-rounded-width",
    "mixed-page-size-64",
)


def _grid_cases() -> list[Any]:
    marks = dict.fromkeys(SLOW, pytest.mark.slow)
    cases = (*LARGE_CASES, *(on_tpu(case) for case in GRID if not case.decode))
    assert marks.keys() <= {case.name for case in cases}
    return [pytest.param(case, id=case.name, marks=marks.get(case.name, pytest.mark.aot)) for case in cases]


def attend(case: OracleCase, rows: PagedRows, *, chip: TpuChip = SMALL_CHIP) -> tuple[jax.Array, jax.Array | None]:
    options = {
        "scale": case.score_scale,
        "sliding_window": case.sliding_window,
        "logit_soft_cap": case.logit_soft_cap,
        "return_lse": case.return_lse,
        "num_kv_heads": case.num_kv_heads,
        "max_q_len": case.max_q_len,
        "chip": chip,
        "interpret": INTERPRET,
    }
    offset = jnp.int32(rows.page_offset) if case.traced_offset else rows.page_offset
    static = {} if case.traced_offset else {"page_offset": offset}
    traced = {"page_offset": offset} if case.traced_offset else {}
    given: Any = jax.jit(functools.partial(paged_attention_extend, **options, **static))(
        jnp.asarray(rows.q),
        jnp.asarray(rows.kv_pages),
        *map(jnp.asarray, rows.rows),
        kv_scales=None if rows.kv_scales is None else jnp.asarray(rows.kv_scales),
        **traced,
    )
    return given if case.return_lse else (given, None)


def smallest_chip(case: OracleCase, rows: PagedRows) -> TpuChip:
    """With so little VMEM that rows have several tiles of queries and of K and V, and buffers are used again."""
    for spare_bytes in range(300_000, 3 * MIB, 100_000):
        chip = TpuChip(MIB + spare_bytes, 3)
        try:
            tiles = _spec(case, rows, chip).tiles
        except UnsupportedOption:
            continue
        assert tiles.tile_len == 128
        assert tiles.tokens < case.max_q_len
        return chip
    raise AssertionError(f"{case.name} has no tiles")


def assert_right(case: OracleCase, capsys: pytest.CaptureFixture[str], *, small: bool = False) -> None:
    """small: with as little VMEM as can be."""
    rows = case_inputs(case)
    out, lse = attend(case, rows, chip=smallest_chip(case, rows) if small else SMALL_CHIP)
    right_out, right_lse = expected(case, rows)
    assert out.dtype == case.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), right_out, rtol=0, atol=tolerance(case))
    assert not np.asarray(out[rows.num_tokens :], np.float32).any()
    if lse is not None:
        np.testing.assert_allclose(np.asarray(lse, np.float64), right_lse, rtol=0, atol=tolerance(case))
    assert_no_race(capsys)


# Most of a minute each.
LONG_CASES = ("bfloat16-window", "two-lane-groups")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case.name in LONG_CASES else case for case in CASES],
    ids=lambda case: case.name,
)
def test_chunks(case: OracleCase, capsys: pytest.CaptureFixture[str]) -> None:
    assert_right(case, capsys, small=True)


def test_outside_of_jit_with_a_table_shorter_than_a_tile() -> None:
    """Interpreted, a kernel that looks up what is behind the table ends with an error."""
    case = on_tpu(OracleCase("small", ((3, 5),), num_heads=1, num_kv_heads=1))
    rows = case_inputs(case)
    out = paged_attention_extend(
        jnp.asarray(rows.q),
        jnp.asarray(rows.kv_pages),
        *map(jnp.asarray, rows.rows),
        page_offset=rows.page_offset,
        scale=case.score_scale,
        sliding_window=None,
        logit_soft_cap=None,
        return_lse=False,
        num_kv_heads=1,
        kv_scales=None,
        max_q_len=3,
        chip=SMALL_CHIP,
        interpret=INTERPRET,
    )
    np.testing.assert_allclose(np.asarray(out, np.float64), expected(case, rows)[0], rtol=0, atol=tolerance(case))


@pytest.mark.aot
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_more_chunks(case: OracleCase, capsys: pytest.CaptureFixture[str]) -> None:
    assert_right(case, capsys, small=True)


@pytest.mark.parametrize("case", _grid_cases())
def test_grid(case: OracleCase, capsys: pytest.CaptureFixture[str]) -> None:
    assert_right(case, capsys)


def test_a_wrong_page_shows() -> None:
    """The tolerance tells one wrong page of a row from rounding, and the other rows are right."""
    case = OracleCase("wrong-page", ((40, 100), (20, 30)), num_heads=1, num_kv_heads=1)
    rows = case_inputs(case)
    right, _ = expected(case, rows)
    rows.page_table[0, 3] = rows.page_table[1, 1]
    error = np.abs(np.asarray(attend(case, rows)[0], np.float64) - right).max(axis=(1, 2))
    assert error[:40].min() > 20 * tolerance(case)
    assert error[40:].max() < tolerance(case)


def test_a_page_size_that_can_not_be_copied_is_refused() -> None:
    case = OracleCase("odd-pages", ((3, 2),), page_size=4, num_heads=1, num_kv_heads=1)
    with pytest.raises(UnsupportedOption, match="page_size that is a power of two and at least 8"):
        attend(case, case_inputs(case))


def test_every_visible_tile_is_an_item_once() -> None:
    """Of any lengths: as many items as tiles of K and V that the queries of each q tile see, in order."""
    # Of a row's first query, at 170 and 350, the window begins with a tile's last token, and with its first.
    for window in (None, 60, 700, 44, 43, 224, 223):
        case = OracleCase("work", LONG, num_heads=3, num_kv_heads=1, dtype="bfloat16", sliding_window=window)
        rows = case_inputs(case)
        spec = _spec(case, rows, smallest_chip(case, rows))
        work, places = extend_work(spec, jnp.asarray(rows.kv_lens), jnp.asarray(rows.cu_q_lens), num_tokens=len(rows.q))
        want = []
        tile = 0
        for q_len, cached in case.lens:
            for first in range(0, q_len if q_len > 1 else 0, spec.tiles.tokens):
                last = min(first + spec.tiles.tokens, q_len) - 1
                begin = 0 if window is None else max(0, cached + first - window + 1) // spec.tiles.tile_len
                want += [(tile, kv_tile) for kv_tile in range(begin, (cached + last) // spec.tiles.tile_len + 1)]
                tile += 1
        items = np.asarray(work.items)[: len(want)]
        assert int(work.counts[0]) == len(want)
        assert [(item >> 15, item & 0x7FFF) for item in items.tolist()] == want
        taken, slots, tokens = (np.asarray(part) for part in (places.taken, places.slots, places.tokens))
        np.testing.assert_array_equal(tokens[slots[taken]], np.flatnonzero(taken))
        assert taken.sum() == sum(q_len for q_len, _ in case.lens if q_len > 1)


def _spec(case: OracleCase, rows: PagedRows, chip: TpuChip) -> ExtendSpec:
    layout = HeadLayout(case.num_heads, case.num_kv_heads, case.head_dim, rows.kv_pages.shape[2])
    dtype, pool_dtype = jnp.dtype(case.dtype), rows.kv_pages.dtype
    tiles = choose_extend_tiles(
        chip,
        layout,
        pool_dtype=pool_dtype,
        compute_dtype=dtype,
        out_dtype=dtype,
        return_lse=case.return_lse,
        max_q_len=case.max_q_len,
        table_len=rows.page_table.shape[1] * case.page_size,
    )
    width = rows.page_table.shape[1]
    return ExtendSpec(
        layout, case.page_size, width, tiles, pool_dtype, dtype, dtype, case.sliding_window, None, case.return_lse
    )


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (9, 3, 64), (4, 1, 128), (8, 4, 256), (28, 4, 128), (32, 8, 96), (64, 8, 64)]
)
@pytest.mark.parametrize("max_q_len", [2, 100, 2048])
def test_tiles_leave_vmem_free(name: str, heads: tuple[int, int, int], max_q_len: int) -> None:
    num_heads, num_kv_heads, head_dim = heads
    layout = HeadLayout(num_heads, num_kv_heads, head_dim, -(-2 * num_kv_heads * head_dim // 128) * 128)
    for dtype, return_lse in (("bfloat16", False), ("bfloat16", True), ("float32", False)):
        types = jnp.dtype(dtype), jnp.dtype(dtype), jnp.dtype(dtype)
        tiles = choose_extend_tiles(
            CHIPS[name],
            layout,
            pool_dtype=types[0],
            compute_dtype=types[1],
            out_dtype=types[2],
            return_lse=return_lse,
            max_q_len=max_q_len,
            table_len=4096,
        )
        used = sum(vmem_array_bytes(*array) for array in vmem_arrays(layout, tiles, *types, return_lse=return_lse))
        assert tiles.vmem_bytes == used <= min(CHIPS[name].vmem_bytes, VMEM_BUDGET_BYTES) - VMEM_MARGIN_BYTES
        assert num_kv_heads * tiles.chunks_per_head % 2 == 0
        assert tiles.chunk_tokens * (num_heads // num_kv_heads) % 16 == 0


def test_too_little_vmem_is_refused() -> None:
    layout = HeadLayout(32, 8, 128, 2048)
    types = {"pool_dtype": jnp.bfloat16, "compute_dtype": jnp.bfloat16, "out_dtype": jnp.bfloat16}
    with pytest.raises(UnsupportedOption, match=r"the smallest tiles of a chunk take \d+ bytes of VMEM"):
        choose_extend_tiles(TpuChip(2 * MIB, 3), layout, **types, return_lse=False, max_q_len=64, table_len=4096)
