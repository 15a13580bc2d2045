"""The TPU decode kernel, interpreted on the CPU: VMEM starts as NaN, what no row wrote is poison, races are found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tpu_interpreter import INTERPRET, assert_no_race

from radix_jax.pallas_kernels.paged_attention.backends import UnsupportedOption
from radix_jax.pallas_kernels.paged_attention.oracle_grid import (
    DECODE,
    GRID,
    OracleCase,
    PagedRows,
    case_inputs,
    expected,
    tolerance,
)
from radix_jax.pallas_kernels.paged_attention.tpu import attend_and_write_tpu, paged_attention_tpu
from radix_jax.pallas_kernels.paged_attention.tpu_decode import spec_of
from radix_jax.pallas_kernels.paged_attention.tpu_steps import NUM_COPY_STEPS, decode_steps
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import MIB, TpuChip, write_group

# So little VMEM that tiles are 128 tokens long (float8: 256): rows then have several, and buffers are used again.
SMALL_CHIP = TpuChip(MIB + 350_000, 3)
# The same for wide pools of float32.
WIDE_CHIP = TpuChip(MIB + 800_000, 3)
FOUR_BUFFERS = TpuChip(3 * MIB, 4)
LONG = tuple((1, kv_len - 1) for kv_len in (300, 5, 128, 1, 129, 260))
DECODE_CASES = tuple(case for case in GRID if case.decode)


def on_tpu(case: OracleCase) -> OracleCase:
    """The case with the pool a TPU needs: whole groups of lanes, and pages of at least a tile's rows."""
    width = 2 * case.num_kv_heads * case.head_dim + case.spare_lanes
    page_size = 32 if "float8" in (case.pool_dtype or "") else max(case.page_size, 8)
    num_pages = None if case.num_pages is None else 1000
    return replace(case, spare_lanes=case.spare_lanes - width % -128, page_size=page_size, num_pages=num_pages)


def assert_right(case: OracleCase, rows: PagedRows, out: jax.Array, lse: jax.Array | None = None) -> None:
    right_out, right_lse = expected(case, rows)
    assert out.dtype == case.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), right_out, rtol=0, atol=tolerance(case))
    # Tokens of no row are 0.
    assert not np.asarray(out[rows.num_tokens :], np.float32).any()
    if lse is not None:
        np.testing.assert_allclose(np.asarray(lse, np.float64), right_lse, rtol=0, atol=tolerance(case))


def attend(case: OracleCase, rows: PagedRows, *, chip: TpuChip, lse: bool = True) -> Any:
    offset = jnp.int32(rows.page_offset) if case.traced_offset else rows.page_offset
    return paged_attention_tpu(
        jnp.asarray(rows.q),
        jnp.asarray(rows.kv_pages),
        *map(jnp.asarray, rows.rows),
        page_offset=offset,
        scale=case.score_scale,
        sliding_window=case.sliding_window,
        logit_soft_cap=case.logit_soft_cap,
        return_lse=lse,
        num_kv_heads=case.num_kv_heads,
        kv_scales=None if rows.kv_scales is None else jnp.asarray(rows.kv_scales),
        max_q_len=1,
        chip=chip,
        interpret=INTERPRET,
    )


def tile_len(case: OracleCase, rows: PagedRows, chip: TpuChip) -> int:
    """Of the case on the chip."""
    return spec_of(
        rows.q,
        rows.kv_pages,
        rows.page_table.shape[1],
        num_kv_heads=case.num_kv_heads,
        sliding_window=case.sliding_window,
        logit_soft_cap=case.logit_soft_cap,
        return_lse=True,
        is_scaled=case.scaled,
        writes=True,
        chip=chip,
    ).tiles.tile_len


def bits(array: Any) -> np.ndarray:
    """What can be compared where NaN is the same as NaN."""
    array = np.asarray(array)
    return array.view(f"uint{array.dtype.itemsize * 8}")


def assert_writes(case: OracleCase, rows: PagedRows, *, chip: TpuChip) -> None:
    """Attention with each row's last token given apart is as if it were in the pool, and then it is."""
    num_rows, page_size = len(case.lens), case.page_size
    positions = rows.kv_lens[:num_rows] - 1
    pages = rows.page_table[np.arange(num_rows), positions // page_size] + rows.page_offset
    places = (pages, positions % page_size)
    num_lanes = 2 * case.num_kv_heads * case.head_dim
    scales = np.ones((case.num_kv_heads, 2), np.float32) if rows.kv_scales is None else rows.kv_scales
    tokens = rows.kv_pages[places][:, :num_lanes].astype(np.float32)
    tokens = tokens.reshape(num_rows, case.num_kv_heads, 2, case.head_dim) * scales[:, :, None]
    padded = np.full((len(rows.q), *tokens.shape[1:]), np.nan, np.float32)
    padded[:num_rows] = tokens
    pool = rows.kv_pages.copy()
    pool[places] = np.nan
    out, written = attend_and_write_tpu(
        jnp.asarray(rows.q),
        jnp.asarray(padded[:, :, 0]),
        jnp.asarray(padded[:, :, 1]),
        jnp.asarray(pool),
        *map(jnp.asarray, rows.rows),
        jnp.zeros(len(rows.q), jnp.int32),
        page_offset=rows.page_offset,
        scale=case.score_scale,
        sliding_window=case.sliding_window,
        logit_soft_cap=case.logit_soft_cap,
        kv_scales=None if rows.kv_scales is None else jnp.asarray(rows.kv_scales),
        max_q_len=1,
        chip=chip,
        interpret=INTERPRET,
    )
    assert_right(case, rows, out)
    given, want = bits(written).copy(), bits(rows.kv_pages).copy()
    want[places[0], places[1], num_lanes:] = 0
    group = write_group(pool.dtype)
    for page, place in zip(*places, strict=True):
        # Slots behind a row's end, which hold nothing, may have changed where they are written with it.
        end = place - place % group + group
        given[page, place + 1 : end] = want[page, place + 1 : end]
    np.testing.assert_array_equal(given, want)


# Between them: each kind of dtype, a window, a soft cap, heads that share a slab and one that fills two, lanes in two
# groups and spare ones, tiles of several pages and pages of several tiles, more tokens than rows, a traced offset.
CASES = (
    OracleCase("bfloat16", DECODE, decode=True, num_heads=6, num_kv_heads=3, dtype="bfloat16", num_token_pads=5),
    OracleCase("two-lane-groups", LONG, decode=True, num_heads=3, num_kv_heads=3, head_dim=96, traced_offset=True),
    OracleCase(
        "large-pages", LONG, decode=True, page_size=256, num_heads=16, num_kv_heads=1, sliding_window=140, head_dim=128
    ),
)
WRITING_CASES = (
    OracleCase("bfloat16-writing", LONG, decode=True, num_heads=8, num_kv_heads=2, dtype="bfloat16", page_size=8),
    OracleCase(
        "float8-writing",
        LONG,
        decode=True,
        dtype="bfloat16",
        pool_dtype="float8_e4m3fn",
        scaled=True,
        logit_soft_cap=2.0,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attends(case: OracleCase, capsys: pytest.CaptureFixture[str]) -> None:
    case = on_tpu(case)
    rows = case_inputs(case)
    chip = WIDE_CHIP if rows.kv_pages.dtype == np.float32 else SMALL_CHIP
    assert tile_len(case, rows, chip) == 128 < rows.kv_lens.max()
    assert_right(case, rows, *attend(case, rows, chip=chip))
    assert_no_race(capsys)


@pytest.mark.parametrize("case", WRITING_CASES, ids=lambda case: case.name)
def test_attends_and_writes(case: OracleCase, capsys: pytest.CaptureFixture[str]) -> None:
    """Tiles of 16 rows are two pages of 8, of which one is written."""
    case = on_tpu(case)
    rows = case_inputs(case)
    assert tile_len(case, rows, SMALL_CHIP) < rows.kv_lens.max()
    assert_writes(case, rows, chip=replace(SMALL_CHIP, has_tall_tiles=case.page_size == 8))
    assert_no_race(capsys)


def test_a_wrong_page_shows() -> None:
    """The same comparison fails if one page of the longest row is another."""
    case = on_tpu(OracleCase("small", ((1, 3), (1, 20)), decode=True, num_heads=2, num_kv_heads=1))
    rows = case_inputs(case)
    assert_right(case, rows, attend(case, rows, chip=SMALL_CHIP, lse=False))
    rows.page_table[1, 0] = rows.page_table[0, 0]
    right = replace(rows, page_table=case_inputs(case).page_table)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_right(case, right, attend(case, rows, chip=SMALL_CHIP, lse=False))


def read_before_it_came(x: Any, out: Any, buffer: Any, semaphore: Any) -> None:
    copy = pltpu.make_async_copy(x, buffer, semaphore)
    copy.start()
    out[...] = buffer[...]
    copy.wait()


def copy_over_copies(x: Any, out: Any, buffer: Any, semaphore: Any) -> None:
    """So many that they do not all tick the same part of the clock."""
    copies = [pltpu.make_async_copy(x, buffer, semaphore) for _ in range(8)]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
    out[...] = buffer[...]


@pytest.mark.parametrize("kernel", [read_before_it_came, copy_over_copies])
def test_races_are_found(kernel: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """What the other tests rely on."""
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=INTERPRET,
    )

    def run() -> None:
        jax.block_until_ready(call(jnp.ones((8, 128))))
        assert_no_race(capsys)

    with pytest.raises((AssertionError, RuntimeError), match="RACE DETECTED"):
        run()
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("name", ["decode-page-size-1", "decode-highest-pages", "decode-head-dim-80", "decode-float16"])
def test_cases_of_the_grid_that_are_refused(name: str) -> None:
    case = next(case for case in DECODE_CASES if case.name == name)
    with pytest.raises(UnsupportedOption, match=r"page_size|multiple of 128 lanes|float16"):
        attend(case, case_inputs(replace(case, num_pages=None)), chip=SMALL_CHIP)


@pytest.mark.parametrize("mxu_size", [128, 256])
@pytest.mark.parametrize("num_slabs", [1, 2, 3, 4, 5, 8, 32])
def test_parts_of_a_slab_are_in_order(num_slabs: int, mxu_size: int) -> None:
    steps = decode_steps(num_slabs, mxu_size)
    at = {step: index for index, step in enumerate(steps)}
    assert len(at) == len(steps) == 5 * num_slabs + NUM_COPY_STEPS + 2
    for slab in range(num_slabs):
        scores = max(at["scores_low", slab], at["scores_high", slab])
        assert scores < at["softmax", slab] < at["values_low", slab] < at["values_high", slab]
    assert all(("copies", index) in at for index in range(NUM_COPY_STEPS))


# The rest of the grid takes minutes. These and those that write have between them: a window, a soft cap, log sums,
# heads of 64 to 256, up to 16 query heads on a kv head, each dtype, a traced offset, two lengths of pages.
SLOW = ("more-tokens-than-rows", "6-heads-on-2", "page-size-64", "window-1", "lse", "float8_e5m2")
SLOW_WRITING = (
    "traced-page-offset",
    "16-heads-on-1",
    "head-dim-80",
    "head-dim-96",
    "head-dim-128",
    "head-dim-256",
    "window-16",
    "soft-cap",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
)


def _grid_cases(slow_names: tuple[str, ...], *, writes: bool) -> list[Any]:
    marks = dict.fromkeys((f"decode-{name}" for name in slow_names), pytest.mark.slow)
    cases = [case for case in DECODE_CASES if case.dtype != "float16" and not (writes and case.return_lse)]
    assert marks.keys() <= {case.name for case in cases}
    return [pytest.param(on_tpu(case), id=case.name, marks=marks.get(case.name, pytest.mark.aot)) for case in cases]


@pytest.mark.parametrize("case", _grid_cases(SLOW, writes=False))
def test_the_grid(case: OracleCase, capsys: pytest.CaptureFixture[str]) -> None:
    rows = case_inputs(case)
    assert_right(case, rows, *attend(case, rows, chip=FOUR_BUFFERS))
    assert_no_race(capsys)


@pytest.mark.parametrize("case", _grid_cases(SLOW_WRITING, writes=True))
def test_the_grid_writing(case: OracleCase, capsys: pytest.CaptureFixture[str]) -> None:
    assert_writes(case, case_inputs(case), chip=FOUR_BUFFERS)
    assert_no_race(capsys)


@pytest.fixture
def any_lens() -> Callable[[int], PagedRows]:
    """Rows of any lengths up to 400, padding rows among them and not behind, as arrays of one shape."""

    def make(seed: int) -> PagedRows:
        rng = np.random.default_rng(seed)
        lens = rng.integers(1, 401, 6)
        case = OracleCase("any", tuple((1, int(x) - 1) for x in lens), decode=True, num_row_pads=0, dtype="bfloat16")
        rows = case_inputs(replace(on_tpu(case), num_token_pads=0))
        table = np.zeros((8, 25), np.int32)
        kv_lens, q_lens = np.zeros(8, np.int32), np.zeros(8, np.int32)
        at = np.sort(rng.permutation(8)[:6])
        table[at, : rows.page_table.shape[1]] = rows.page_table
        kv_lens[at], q_lens[at] = rows.kv_lens, 1
        pool = np.full((2 * 170, *rows.kv_pages.shape[1:]), np.nan, rows.kv_pages.dtype)
        pool[: len(rows.kv_pages)] = rows.kv_pages
        cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        return replace(rows, kv_pages=pool, page_table=table, kv_lens=kv_lens, cu_q_lens=cu_q_lens)

    return make


@pytest.mark.slow
def test_any_lengths(any_lens: Callable[[int], PagedRows], capsys: pytest.CaptureFixture[str]) -> None:
    case = OracleCase("any", LONG, decode=True, dtype="bfloat16")
    for seed in range(12):
        rows = any_lens(seed)
        assert_right(case, rows, *attend(replace(case, traced_offset=True), rows, chip=SMALL_CHIP))
    assert_no_race(capsys)
