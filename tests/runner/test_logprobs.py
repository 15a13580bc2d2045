"""Log-probabilities of sampled tokens: values, ranks, ties, and zeros where nobody asks."""

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from radix_jax.request import MAX_LOGPROBS
from radix_jax.runner.logprobs import logprob_of, token_logprobs

LOGPROBS, LOGPROB_OF = jax.jit(token_logprobs), jax.jit(logprob_of)


def test_values_ranks_and_the_most_likely_ones() -> None:
    rng = np.random.default_rng(0)
    logits = (5 * rng.standard_normal((8, 300))).astype(np.float32)
    tokens = rng.integers(0, 300, 8).astype(np.int32)
    sampling = rng.standard_normal(8).astype(np.float32)
    found = LOGPROBS(logits, tokens, sampling, np.array([-1, 0, 3, 20, -1, -1, -1, -1], np.int32))
    expected = log_softmax(np.float64(logits), axis=1)
    np.testing.assert_allclose(found.sampled, expected[np.arange(8), tokens], rtol=0, atol=1e-5)
    assert np.asarray(found.rank).tolist() == [
        1 + int((row > row[token]).sum()) for row, token in zip(logits, tokens, strict=True)
    ]
    order = np.argsort(-logits, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order, axis=1), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found.sampling, sampling)


@pytest.mark.parametrize(("token", "rank"), [(0, 1), (1, 4), (2, 4), (3, 4), (4, 6), (5, 6)])
def test_equally_likely_tokens_share_the_worst_of_their_ranks(token: int, rank: int) -> None:
    logits = np.array([[3.0, 2.0, 2.0, 2.0, -1.0, -1.0]], np.float32)
    found = LOGPROBS(logits, np.array([token], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
    assert int(found.rank[0]) == rank


def test_a_small_vocabulary_has_no_more_than_all_of_it() -> None:
    logits = np.array([[0.0, 2.0, 1.0]], np.float32)
    found = LOGPROBS(logits, np.array([1], np.int32), np.zeros(1, np.float32), np.full(1, 20, np.int32))
    assert np.asarray(found.top_ids).tolist() == [[1, 2, 0]]


def test_what_no_row_asks_for_is_zero() -> None:
    logits = np.ones((2, 30), np.float32)
    ones = np.ones(2, np.float32)
    nothing = LOGPROBS(logits, np.ones(2, np.int32), ones, np.full(2, -1, np.int32))
    assert not any(np.asarray(leaf).any() for leaf in nothing)
    own = LOGPROBS(logits, np.ones(2, np.int32), ones, np.array([-1, 0], np.int32))
    assert not np.asarray(own.top_ids).any()
    np.testing.assert_allclose(own.sampled, [-np.log(30)] * 2, rtol=1e-6)


def test_dropped_tokens_take_no_part() -> None:
    logits = np.array([[1.0, -np.inf, 1.0, -np.inf]], np.float32)
    np.testing.assert_allclose(LOGPROB_OF(logits, np.array([2], np.int32)), [np.log(0.5)], rtol=1e-6)
