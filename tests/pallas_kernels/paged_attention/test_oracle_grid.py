"""Every backend of ours through the oracle grid; that the grid holds what it says; that a wrong page is seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from radix_jax.check_kernel import run_case
from radix_jax.pallas_kernels.paged_attention.backends import attention_fn
from radix_jax.pallas_kernels.paged_attention.oracle_grid import GRID, OracleCase, case_inputs, expected, tolerance

# What is interpreted takes minutes; the tests of the kernels themselves are the short form of it.
BACKENDS = ("xla", pytest.param("pallas_interpret", marks=pytest.mark.slow))
BY_NAME = {case.name: case for case in GRID}


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_right(backend: str, case: OracleCase) -> None:
    result = run_case(backend, attention_fn(backend), case)
    assert result.status == "ok", result


@pytest.mark.parametrize("name", ["decode", "cached-prefix", "mixed-bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_page_is_seen(backend: str, name: str) -> None:
    """One page of the longest row is another one of the same row."""
    fn, case = attention_fn(backend), BY_NAME[name]
    row = int(np.argmax(case_inputs(case).kv_lens))

    def astray(q: Any, kv_pages: Any, page_table: Any, *lens: Any, **options: Any) -> Any:
        return fn(q, kv_pages, page_table.at[row, 2].set(page_table[row, 5]), *lens, **options)

    result = run_case(backend, astray, case)
    assert result.status == "wrong"
    assert f"row {row}" in result.message


def values(of: Callable[[OracleCase], Any]) -> set[Any]:
    return {of(case) for case in GRID}


def test_the_grid_holds_what_kernels_fail_on() -> None:
    assert len(BY_NAME) == len(GRID)
    assert values(lambda case: case.page_size) == {1, 16, 64}
    assert values(lambda case: case.num_heads // case.num_kv_heads) >= {1, 2, 3, 5, 8, 16}
    for decode in (True, False):
        here = [case for case in GRID if case.decode == decode]
        assert {case.head_dim for case in here} >= {64, 80, 96, 128, 256}
        assert {case.dtype for case in here} == {"float32", "bfloat16", "float16"}
        assert {case.pool_dtype for case in here} >= {"float8_e4m3fn", "float8_e5m2"}
        for name in ("sliding_window", "logit_soft_cap", "return_lse", "spare_lanes", "scaled"):
            assert len({getattr(case, name) for case in here}) > 1, name


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_only_what_a_row_wrote_is_finite(case: OracleCase) -> None:
    rows = case_inputs(case)
    finite = np.isfinite(rows.kv_pages.astype(np.float32))
    width = 2 * case.num_kv_heads * case.head_dim
    assert not finite[..., width:].any()
    assert not finite[: rows.page_offset].any()
    assert not finite[rows.page_offset].any()
    assert finite.sum() == rows.kv_lens.sum() * width
    if case.num_pages is not None:
        pages_of_rows = np.flatnonzero(finite.any(axis=(1, 2)))
        assert pages_of_rows.min() == len(rows.kv_pages) - len(pages_of_rows)
        assert rows.page_table.max() > np.iinfo(np.int16).max
        assert pages_of_rows.max() > np.iinfo(np.uint16).max


def test_options_change_what_is_right() -> None:
    """A kernel that ignores an option is off by far more than the tolerance."""
    plain = {"sliding_window": None, "logit_soft_cap": None, "scale": None}
    # A window longer than every row and a cap far above every score are none.
    as_none = {"mixed-window-longer-than-rows", "decode-high-soft-cap"}
    assert as_none <= set(BY_NAME)
    for case in GRID:
        rows = case_inputs(case)
        for name in plain:
            if getattr(case, name) is None or case.name in as_none:
                continue
            other = OracleCase(**{**vars(case), name: plain[name]})
            error = np.abs(expected(case, rows)[0] - expected(other, rows)[0]).max()
            assert error > 100 * tolerance(case), (case.name, name)


def test_tolerances_follow_dtype_length_and_matmul() -> None:
    case = BY_NAME["mixed"]
    assert tolerance(case) < 2e-5
    assert tolerance(BY_NAME["mixed-bfloat16"]) == pytest.approx(4 * float(jnp.finfo("bfloat16").eps), rel=0.01)
    assert tolerance(BY_NAME["decode-head-dim-256"]) > tolerance(BY_NAME["decode"]) > tolerance(BY_NAME["one-token"])
    assert tolerance(case, 2.0**-10) == pytest.approx(4 * 2.0**-10, rel=0.01)


def rounded(values: np.ndarray, num_bits: int) -> np.ndarray:
    """float32 values with `num_bits` bits of mantissa, to nearest; infinities and NaN as they are."""
    spare = 23 - num_bits
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64) + (1 << (spare - 1))
    near = (bits >> spare << spare).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(values), near, values)


@pytest.mark.parametrize(("name", "num_bits"), [("TF32", 10), ("bfloat16", 7)])
def test_matmuls_that_round_their_inputs_are_told_from_wrong_ones(name: str, num_bits: int) -> None:
    """What a device's matmuls do to float32 by default stays within half of the tolerance that knows of it."""
    for case in GRID:
        if case.dtype != "float32":
            continue
        rows = case_inputs(case)
        other = replace(rows, q=rounded(rows.q, num_bits), kv_pages=rounded(rows.kv_pages, num_bits))
        for right, moved in zip(expected(case, rows), expected(case, other), strict=True):
            error = np.abs(right[: rows.num_tokens] - moved[: rows.num_tokens]).max()
            assert error < tolerance(case, 2.0**-num_bits) / 2, (case.name, name)
