"""What bias, min_tokens and penalties make of logits, and the counts that they are made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sampling_oracle import adjusted

from radix_jax import SamplingParams
from radix_jax.arrays import SamplerState
from radix_jax.plan import Bucket, StepPlan, StepRow
from radix_jax.request import Request
from radix_jax.runner.pack import Packer
from radix_jax.runner.sampler_state import (
    adjust,
    count_tokens,
    empty_sampler_state,
    fill_sampler_row,
    needs_sampler_row,
    sampler_row,
)

VOCAB_SIZE, NUM_SEATS = 40, 5
ADJUST, COUNT, FILL = jax.jit(adjust), jax.jit(count_tokens), jax.jit(fill_sampler_row)


def make_row(seat: int, prompt: list[int], output: list[int], stop_ids: tuple[int, ...] = (), **params: Any) -> StepRow:
    request = Request(
        request_id=str(seat),
        token_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(temperature=0.0, **params),
        max_tokens=99,
        stop_ids=frozenset(stop_ids),
        seed=0,
        arrival=0,
    )
    output_ids = np.array(output, np.int32)
    token_ids, pages = np.append(request.token_ids, output_ids), np.array([1], np.int32)
    return StepRow(request, token_ids, 0, pages, True, seat=seat, output_ids=output_ids)


def pack(rows: list[StepRow], num_rows: int = 4) -> Any:
    plan = StepPlan("prefill", tuple(rows), Bucket("prefill", 64, num_rows, 16), len(rows))
    return Packer(page_size=4, num_slots=1000).pack(plan).sampling


def filled(rows: list[StepRow]) -> SamplerState:
    """On top of what others left in all seats."""
    left = np.random.default_rng(0).integers(0, 2**31, (NUM_SEATS, VOCAB_SIZE)).astype(np.int32)
    state = SamplerState(tokens=jnp.asarray(left), bias=jnp.ones((NUM_SEATS, VOCAB_SIZE), jnp.float32))
    for row in rows:
        state = FILL(state, sampler_row(row, VOCAB_SIZE))
    return state


ROWS = [
    make_row(3, [1, 2, 3, 3], [3, 9, 9], repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=-0.7),
    make_row(1, [5], [], (7, 8, 1000), min_tokens=2, logit_bias={7: 50.0, 9: -3.5, 39: 0.25}),
    make_row(0, [4, 4], [6, 5], (6, 4), min_tokens=3, repetition_penalty=0.5),
    make_row(4, [4, 4], [6, 5], (6,), min_tokens=2, presence_penalty=0.5),  # has its two already
]


def test_each_row_by_its_own_seat() -> None:
    logits = np.random.default_rng(1).standard_normal((4, VOCAB_SIZE)).astype(np.float32)
    after = np.asarray(ADJUST(logits, pack(ROWS), filled(ROWS)))
    for row, before, now in zip(ROWS, logits, after, strict=True):
        request = row.request
        stop_ids = [token for token in request.stop_ids if token < VOCAB_SIZE]
        expected = adjusted(before, request.sampling, request.token_ids.tolist(), row.output_ids.tolist(), stop_ids)
        np.testing.assert_allclose(now, expected, rtol=1e-5, atol=1e-6)
    assert np.isneginf(after).sum(axis=1).tolist() == [0, 2, 2, 0]


def test_rows_that_ask_for_nothing_stay_bit_by_bit() -> None:
    """Whatever lies in the seat that their zeros name, and in any company."""
    logits = np.random.default_rng(2).standard_normal((4, VOCAB_SIZE)).astype(np.float32)
    rows = [ROWS[0], make_row(0, [1], []), make_row(1, [5], [], min_tokens=2), make_row(2, [2], [], (3,), logprobs=1)]
    assert [needs_sampler_row(row) for row in rows] == [True, False, False, False]
    after = np.asarray(ADJUST(logits, pack(rows), filled([ROWS[0]])))
    np.testing.assert_array_equal(after[1:], logits[1:])
    assert (after[0] != logits[0]).any()


def test_min_tokens_ends_by_position_alone() -> None:
    """It keeps no counts: the state stays as it was filled, and stop ids come back with the place of the token."""
    row = make_row(1, [5, 6], [], (7,), min_tokens=2)
    assert needs_sampler_row(row)
    state, sampling = filled([row]), pack([row])
    assert sampling.position[0] == 2
    np.testing.assert_array_equal(COUNT(state, sampling, np.full(4, 9, np.int32)).tokens, state.tokens)
    logits = np.zeros((4, VOCAB_SIZE), np.float32)
    for position, is_early in ((2, True), (3, True), (4, False)):
        sampling.position[0] = position
        after = np.asarray(ADJUST(logits, sampling, state))
        assert np.flatnonzero(np.isneginf(after[0])).tolist() == ([7] if is_early else [])
        np.testing.assert_array_equal(after[1:], logits[1:])


def test_counting_touches_the_seats_of_rows_that_adjust_and_nothing_else() -> None:
    rows = [ROWS[0], make_row(0, [1], []), ROWS[3]]
    state = filled(ROWS)
    before = np.asarray(state.tokens)
    after = np.asarray(COUNT(state, pack(rows), np.array([9, 9, VOCAB_SIZE - 1, 9], np.int32)).tokens)
    changed = {
        (int(seat), int(token)): int(after[seat, token] - before[seat, token])
        for seat, token in np.argwhere(after != before)
    }
    assert changed == {(3, 9): 1, (4, VOCAB_SIZE - 1): 1}


def test_a_row_that_does_not_sample_fills_nothing() -> None:
    assert not needs_sampler_row(ROWS[0]._replace(samples=False))


def test_an_empty_state_changes_nothing() -> None:
    logits = np.random.default_rng(3).standard_normal((4, VOCAB_SIZE)).astype(np.float32)
    sampling = pack([make_row(2, [1], [], logit_bias={3: 1.0})])
    np.testing.assert_array_equal(ADJUST(logits, sampling, empty_sampler_state(NUM_SEATS, VOCAB_SIZE)), logits)
