"""The oracle of paged attention against numbers worked out by hand, and against a dense softmax without pages."""

import numpy as np
import pytest

from radix_jax.pallas_kernels.paged_attention.oracle_grid import GRID, OracleCase, case_inputs, expected
from radix_jax.pallas_kernels.paged_attention.reference import paged_attention_reference


def one_row(keys: list[float], values: list[float], q: list[float], **options: object) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of one head of one lane: a row of `keys` and `values` in pages of 2, the last `q` of which ask."""
    num_pages = -(-len(keys) // 2)
    pool = np.full((num_pages + 1, 2, 2), np.nan)
    for s, pair in enumerate(zip(keys, values, strict=True)):
        pool[num_pages - s // 2, s % 2] = pair  # pages from the last to the first
    out, lse = paged_attention_reference(
        np.array(q)[:, None, None],
        pool,
        np.arange(num_pages, 0, -1, dtype=np.int32)[None],
        np.array([len(keys)], np.int32),
        np.array([0, len(q)], np.int32),
        page_offset=0,
        return_lse=True,
        **({"scale": 1.0} | options),
    )
    return out[:, 0, 0], lse[:, 0]


def test_equal_scores_are_the_mean_of_what_is_seen() -> None:
    """The two queries see 3 and 4 of the values 1, 2, 4, 9; log of a sum of n ones is log n."""
    out, lse = one_row([0.0] * 4, [1.0, 2.0, 4.0, 9.0], [5.0, 7.0])
    np.testing.assert_allclose(out, [7 / 3, 4.0])
    np.testing.assert_allclose(lse, np.log([3.0, 4.0]))


@pytest.mark.parametrize(("window", "means"), [(1, [4.0, 9.0]), (2, [3.0, 6.5]), (3, [7 / 3, 5.0]), (9, [7 / 3, 4.0])])
def test_a_window_counts_the_query_itself(window: int, means: list[float]) -> None:
    out, lse = one_row([0.0] * 4, [1.0, 2.0, 4.0, 9.0], [5.0, 7.0], sliding_window=window)
    np.testing.assert_allclose(out, means)
    np.testing.assert_allclose(lse, np.log([min(window, 3), min(window, 4)]))


def test_scores_are_scaled_then_exponentiated() -> None:
    """q=2, keys 0 and log 3 / 2, scale 1: weights 1 and 3, of sum 4; scale 0.5: weights 1 and sqrt(3)."""
    keys, values = [0.0, float(np.log(3.0)) / 2], [8.0, 4.0]
    out, lse = one_row(keys, values, [2.0])
    np.testing.assert_allclose([out[0], lse[0]], [(8 + 3 * 4) / 4, np.log(4.0)])
    out, lse = one_row(keys, values, [2.0], scale=0.5)
    root = 3.0**0.5
    np.testing.assert_allclose([out[0], lse[0]], [(8 + root * 4) / (1 + root), np.log(1 + root)])


def test_a_soft_cap_bends_scaled_scores() -> None:
    """A score of 10 under cap 2 becomes 2 tanh 5 = 1.99982, where clipping would give 2 and no cap 10."""
    out, lse = one_row([0.0, 10.0], [0.0, 1.0], [4.0], scale=0.25, logit_soft_cap=2.0)
    capped = 2.0 * np.tanh(5.0)
    assert capped == pytest.approx(1.9998184)
    np.testing.assert_allclose([out[0], lse[0]], [np.exp(capped) / (1 + np.exp(capped)), np.log(1 + np.exp(capped))])


def test_scales_multiply_what_is_stored() -> None:
    scales = np.array([[3.0, 5.0]], np.float32)
    scaled = one_row([0.1, 0.2], [1.0, 2.0], [1.0], kv_scales=scales)
    plain = one_row([0.1 * 3, 0.2 * 3], [1.0 * 5, 2.0 * 5], [1.0])
    np.testing.assert_allclose(scaled, plain)


def test_heads_of_a_group_are_neighbours() -> None:
    """4 query heads on 2: heads 0 and 1 read K and V of lanes 0 and 1, heads 2 and 3 those of lanes 2 and 3."""
    pool = np.array([[[0.0, 10.0, 0.0, 20.0, np.nan]]])
    rows = np.zeros((1, 1), np.int32), np.array([1], np.int32), np.array([0, 1], np.int32)
    out = paged_attention_reference(np.ones((1, 4, 1)), pool, *rows, page_offset=0, scale=1.0, num_kv_heads=2)
    np.testing.assert_array_equal(out[0, :, 0], [10.0, 10.0, 20.0, 20.0])


def dense(case: OracleCase) -> tuple[np.ndarray, np.ndarray]:
    """A case as one matrix of scores a row and head, softmax over all of it, what is not seen at minus infinity."""
    rows = case_inputs(case)
    out, lse = np.zeros(rows.q.shape), np.full(rows.q.shape[:2], -np.inf)
    group, width = case.num_heads // case.num_kv_heads, 2 * case.num_kv_heads * case.head_dim
    scales = np.ones((case.num_kv_heads, 2)) if rows.kv_scales is None else rows.kv_scales.astype(np.float64)
    for b, kv_len in enumerate(rows.kv_lens):
        first, end = rows.cu_q_lens[b : b + 2]
        places = [(rows.page_table[b, s // case.page_size], s % case.page_size) for s in range(kv_len)]
        lanes = [rows.kv_pages[page + rows.page_offset, slot, :width].astype(np.float64) for page, slot in places]
        kv = np.array(lanes).reshape(kv_len, case.num_kv_heads, 2, case.head_dim) * scales[:, :, None]
        k, v = np.repeat(kv, group, axis=1).transpose(2, 1, 0, 3)  # heads of a group read the same
        scores = np.einsum("tnh,nsh->nts", rows.q[first:end].astype(np.float64), k) * case.score_scale
        if case.logit_soft_cap is not None:
            scores = case.logit_soft_cap * np.tanh(scores / case.logit_soft_cap)
        distance = np.arange(kv_len - (end - first), kv_len)[:, None] - np.arange(kv_len)
        seen = (distance >= 0) & (distance < (case.sliding_window or kv_len))
        exp = np.exp(np.where(seen, scores, -np.inf))
        out[first:end] = np.einsum("nts,nsh->tnh", exp / exp.sum(axis=-1, keepdims=True), v)
        lse[first:end] = np.log(exp.sum(axis=-1)).T
    return out, lse


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_every_case_agrees_with_a_dense_softmax(case: OracleCase) -> None:
    for right, other in zip(expected(case, case_inputs(case)), dense(case), strict=True):
        np.testing.assert_allclose(right, other, rtol=0, atol=1e-12)


def test_float32_computes_in_float32() -> None:
    case = next(case for case in GRID if case.name == "mixed")
    rows = case_inputs(case)
    plain = paged_attention_reference(rows.q, rows.kv_pages, *rows.rows, page_offset=rows.page_offset, scale=0.1)
    assert plain.dtype == np.float32
    assert np.isfinite(plain).all()
