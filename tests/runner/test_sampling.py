"""Sampling: greedy is the argmax, filters keep the sets of a plain oracle, draws follow the softmax and their key."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from radix_jax.arrays import SamplingInputs
from radix_jax.runner.sampler_state import empty_sampler_state
from radix_jax.runner.sampling import sample

VOCAB_SIZE = 12
NUM_DRAWS = 8192
# Tokens of one distribution are all seen in NUM_DRAWS draws if none is rarer than this.
RAREST = 4e-3


def tokens_of(logits: jax.Array, rows: SamplingInputs) -> jax.Array:
    """The tokens alone, of rows that ask for nothing which is kept from step to step."""
    return sample(logits, rows, empty_sampler_state(1, logits.shape[1])).tokens


SAMPLE = jax.jit(tokens_of)


def inputs(num_rows: int, **values: Any) -> SamplingInputs:
    """Rows of temperature 1 at positions 0, 1, 2, ...; a value is for all rows, or one each. seed: a plain int."""
    fields: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "sample_index": 0}
    fields |= {"position": np.arange(num_rows), "seed": 0, "seat": 0, "min_len": 0, "adjusts": 0, "num_logprobs": -1}
    fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0} | values
    seeds = [int(seed) for seed in np.broadcast_to(np.asarray(fields.pop("seed"), object), num_rows)]
    floats = "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
    arrays = {
        name: np.broadcast_to(np.asarray(value, np.float32 if name in floats else np.int32), num_rows)
        for name, value in fields.items()
    }
    return SamplingInputs(**arrays, seed=np.array([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds], np.uint32))


def draw(logits: np.ndarray, **values: Any) -> np.ndarray:
    """NUM_DRAWS draws, at as many positions, from the same logits [V]."""
    rows = np.broadcast_to(np.asarray(logits, np.float32), (NUM_DRAWS, len(logits)))
    return np.asarray(SAMPLE(rows, inputs(NUM_DRAWS, **values)))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def kept_probabilities(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, float]:
    """(the distribution after all filters, by their definitions, one token at a time, in float64; how far top_p is from
    any sum that it was compared with). Ties with the least likely token kept are kept too."""
    probabilities = softmax(np.asarray(logits, np.float64) / temperature)
    kept = set(np.flatnonzero(probabilities >= min_p * probabilities.max() * (1 - 1e-9)).tolist())
    if top_k:
        ranked = sorted(kept, key=lambda token: -probabilities[token])
        kept = {token for token in kept if probabilities[token] >= probabilities[ranked[:top_k][-1]]}
    total = sum(probabilities[token] for token in kept)
    reached, least, margin = 0.0, 1.0, 1.0
    for token in sorted(kept, key=lambda token: -probabilities[token]):
        margin = min(margin, abs(reached - top_p))
        if reached > top_p:
            break
        reached += probabilities[token] / total
        least = probabilities[token]
    out = np.where([token in kept and probabilities[token] >= least for token in range(len(logits))], probabilities, 0)
    return out / out.sum(), margin


def test_temperature_zero_is_the_argmax_whatever_else_is_set() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 50)).astype(np.float32)
    logits[3, [7, 20]] = 9.0  # a tie: the lower id
    values = {"top_k": 3, "top_p": 0.5, "min_p": 0.2, "seed": 5}
    for rows in (inputs(64, temperature=0.0), inputs(64, temperature=0.0, **values)):
        np.testing.assert_array_equal(SAMPLE(logits, rows), logits.argmax(axis=1))
    assert logits[3].argmax() == 7


def test_greedy_rows_among_drawn_ones() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((64, 50)).astype(np.float32)
    temperature = np.where(np.arange(64) % 3 == 0, 0.0, 5.0)
    tokens = np.asarray(SAMPLE(logits, inputs(64, temperature=temperature, top_k=40)))
    np.testing.assert_array_equal(tokens[::3], logits.argmax(axis=1)[::3])
    assert (tokens[1::3] != logits.argmax(axis=1)[1::3]).any()


@settings(max_examples=40)
@given(
    logits=st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 0.5, 1.0]), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    temperature=st.sampled_from([0.75, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 11, 12, 13, 1000]),
    top_p=st.sampled_from([1e-3, 0.05, 0.3, 0.62, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.21, 0.55, 0.93, 1.0]),
)
def test_filters_keep_what_the_oracle_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    expected, margin = kept_probabilities(np.array(logits), temperature, top_k, top_p, min_p)
    assume(margin > 1e-4)
    assert expected[expected > 0].min() > RAREST
    tokens = draw(np.array(logits), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(tokens.tolist()) == set(np.flatnonzero(expected).tolist())


DESCENDING = [2.0, 1.0, 1.0, 0.0, -1.0, -3.0]  # softmax: 0.52, 0.19, 0.19, 0.07, 0.03, 0.00


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1, 2}),  # the second one ties with the third
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 6}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 7}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.45}, {0}),
        ({"top_p": 0.55}, {0, 1, 2}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4, 5}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 0.1}, {0, 1, 2, 3}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 4, "top_p": 0.85}, {0, 1, 2}),  # of what top_k left, three have 0.93
        ({"top_k": 4, "top_p": 0.95}, {0, 1, 2, 3}),
        ({"min_p": 0.3, "top_p": 0.55}, {0}),  # of what min_p left, one has 0.58
        ({"min_p": 0.3, "top_p": 0.6}, {0, 1, 2}),
    ],
)
def test_filters_by_hand(values: dict[str, Any], kept: set[int]) -> None:
    assert set(draw(np.array(DESCENDING), **values).tolist()) == kept


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 2}])
@pytest.mark.parametrize("temperature", [1e-10, 1e-37, 1.2e-38])
def test_a_temperature_near_zero_is_as_good_as_greedy(temperature: float, filters: dict[str, Any]) -> None:
    assert set(draw(np.array([40.0, 50.0, 30.0, -80.0]), temperature=temperature, **filters).tolist()) == {1}


@pytest.mark.parametrize("top_p", [1e-10, 1e-40, 1e-46])
def test_top_p_keeps_the_first_token_however_small_it_is(top_p: float) -> None:
    assert set(draw(np.array([0.0, 1.0, 2.0]), top_p=top_p).tolist()) == {2}


def test_all_tokens_tie_with_the_first() -> None:
    assert set(draw(np.zeros(6), top_k=1).tolist()) == set(range(6))


def test_tokens_at_minus_infinity_are_never_drawn() -> None:
    logits = np.array([0.0, -np.inf, 1.0, -np.inf])
    assert set(draw(logits).tolist()) == {0, 2}
    assert set(draw(logits, top_k=3).tolist()) == {0, 2}


@pytest.mark.parametrize(
    ("temperature", "values"),
    [(1.0, {}), (0.5, {}), (2.0, {}), (1.0, {"top_k": 4}), (1.0, {"top_p": 0.9}), (1.5, {"min_p": 0.1, "top_k": 5})],
)
def test_draws_follow_the_softmax(temperature: float, values: dict[str, Any]) -> None:
    """Chi-square over draws at different positions; it fails by chance once in a million."""
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    expected, _ = kept_probabilities(np.array(DESCENDING), temperature, **filters)
    counts = np.bincount(draw(np.array(DESCENDING), temperature=temperature, seed=11, **values), minlength=6)
    kept = expected > 0
    assert not counts[~kept].any()
    surplus = ((counts - NUM_DRAWS * expected)[kept] ** 2 / (NUM_DRAWS * expected)[kept]).sum()
    assert surplus < stats.chi2.ppf(1 - 1e-6, kept.sum() - 1)


@pytest.mark.parametrize("varied", ["seed", "sample_index", "position"])
def test_each_part_of_the_key_gives_other_draws_that_follow_the_softmax(varied: str) -> None:
    """Keys that differ in one part alone are independent of each other."""
    values: dict[str, Any] = {"seed": 3, "sample_index": 0, "position": 17} | {varied: np.arange(NUM_DRAWS)}
    counts = np.bincount(draw(np.zeros(8), **values), minlength=8)
    expected = NUM_DRAWS / 8
    assert ((counts - expected) ** 2 / expected).sum() < stats.chi2.ppf(1 - 1e-6, 7)


def test_seeds_of_64_bits_all_differ() -> None:
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
    flat = np.zeros((len(seeds), 30_000), np.float32)
    tokens = np.asarray(SAMPLE(flat, inputs(len(seeds), seed=seeds, position=5)))
    assert len(set(tokens.tolist())) == len(seeds)
    np.testing.assert_array_equal(SAMPLE(flat, inputs(len(seeds), seed=seeds, position=5)), tokens)


def test_a_draw_is_the_same_in_any_row_batch_and_company() -> None:
    rng = np.random.default_rng(3)
    own = rng.standard_normal(200).astype(np.float32)
    values = {"temperature": 0.8, "seed": 2**40 + 9, "sample_index": 2, "position": 31}
    for filters in ({}, {"top_k": 50, "top_p": 0.9}):
        alone = int(SAMPLE(own[None], inputs(1, **values, **filters))[0])
        for num_rows, row in ((8, 0), (8, 5), (16, 15)):
            logits = rng.standard_normal((num_rows, 200)).astype(np.float32)
            logits[row] = own
            others: dict[str, Any] = {
                "temperature": rng.choice([0.0, 0.5, 2.0], num_rows),
                "top_k": rng.choice([0, 1, 5], num_rows),
                "top_p": rng.choice([0.3, 1.0], num_rows),
                "min_p": rng.choice([0.0, 0.2], num_rows),
                "seed": rng.integers(0, 2**62, num_rows),
                "sample_index": rng.integers(0, 9, num_rows),
                "position": rng.integers(0, 99, num_rows),
            }
            unfiltered = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
            for name, value in (unfiltered | values | filters).items():
                others[name][row] = value
            assert int(SAMPLE(logits, inputs(num_rows, **others))[row]) == alone


def test_rows_at_different_positions_draw_differently() -> None:
    tokens = np.asarray(SAMPLE(np.zeros((64, 1000), np.float32), inputs(64)))
    assert len(set(tokens.tolist())) > 50
