"""From a StepPlan to arrays, number for number."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import jax
import numpy as np
import pytest

from radix_jax.plan import Bucket, PageCopy, StepKind, StepPlan, StepRow
from radix_jax.request import Request, SamplingParams
from radix_jax.runner.pack import PackedStep, Packer, empty_copies, empty_step, pack_copies, split

PAGE_SIZE = 4
NUM_SLOTS = 1000


def make_row(
    start: int,
    token_ids: list[int],
    pages: list[int],
    *,
    samples: bool = True,
    seed: int = 0,
    seat: int = 0,
    stop_ids: Iterable[int] = (),
    **params: Any,
) -> StepRow:
    """A row of a request whose prompt is all that it has so far."""
    request = Request(
        request_id="r",
        token_ids=np.zeros(start + len(token_ids), np.int32),
        sampling=SamplingParams(**params),
        max_tokens=1,
        stop_ids=frozenset(stop_ids),
        seed=seed,
        arrival=0,
    )
    ids, page_ids = np.array(token_ids, np.int32), np.array(pages, np.int32)
    return StepRow(request=request, token_ids=ids, start=start, pages=page_ids, samples=samples, seat=seat)


def make_plan(kind: StepKind, rows: list[StepRow], num_tokens: int, num_rows: int = 4) -> StepPlan:
    return StepPlan(kind, tuple(rows), Bucket(kind, num_tokens, num_rows, num_pages=5), num_prompt_rows=len(rows))


def make_packer() -> Packer:
    return Packer(page_size=PAGE_SIZE, num_slots=NUM_SLOTS)


def step_arrays(step: PackedStep) -> list[np.ndarray]:
    """All arrays of a packed step, in the order of the buffer."""
    return [getattr(part, field.name) for part in (step.inputs, step.sampling) for field in fields(part)]


def test_ragged_prefill() -> None:
    rows = [
        make_row(0, [11, 12, 13], [7]),
        make_row(6, [21, 22, 23, 24], [2, 9, 5]),  # in the middle of its second page, into its third
        make_row(8, [31], [4, 3, 6]),
    ]
    inputs = make_packer().pack(make_plan("prefill", rows, 12)).inputs
    assert inputs.token_ids.tolist() == [11, 12, 13, 21, 22, 23, 24, 31, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [0, 1, 2, 6, 7, 8, 9, 8, 0, 0, 0, 0]
    assert inputs.page_table.tolist() == [[7, 0, 0, 0, 0], [2, 9, 5, 0, 0], [4, 3, 6, 0, 0], [0, 0, 0, 0, 0]]
    assert inputs.kv_lens.tolist() == [3, 10, 9, 0]
    assert inputs.cu_q_lens.tolist() == [0, 3, 7, 8, 8]
    assert inputs.write_slots.tolist() == [28, 29, 30, 38, 39, 20, 21, 24, 1000 + 8, 1000 + 9, 1000 + 10, 1000 + 11]


def test_decode() -> None:
    rows = [make_row(3, [5], [8]), make_row(4, [6], [1, 2])]
    inputs = make_packer().pack(make_plan("decode", rows, 4)).inputs
    assert inputs.token_ids.tolist() == [5, 6, 0, 0]
    assert inputs.positions.tolist() == [3, 4, 0, 0]
    assert inputs.kv_lens.tolist() == [4, 5, 0, 0]
    assert inputs.cu_q_lens.tolist() == [0, 1, 2, 2, 2]
    assert inputs.write_slots.tolist() == [35, 8, 1002, 1003]


def test_a_full_bucket_has_no_padding() -> None:
    rows = [make_row(i, [i], [i + 1]) for i in range(4)]
    inputs = make_packer().pack(make_plan("decode", rows, 4)).inputs
    assert inputs.cu_q_lens.tolist() == [0, 1, 2, 3, 4]
    assert inputs.write_slots.tolist() == [4, 9, 14, 19]


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_padding_writes_to_distinct_slots_past_the_pool(num_tokens: int) -> None:
    inputs = empty_step(Bucket("prefill", num_tokens, 2, 3), NUM_SLOTS).inputs
    assert inputs.write_slots.tolist() == list(range(NUM_SLOTS, NUM_SLOTS + num_tokens))
    assert not inputs.page_table.any()
    assert not inputs.kv_lens.any()


def test_the_same_plan_gives_the_same_types_and_never_the_same_memory() -> None:
    """A queued step may still read the arrays of the step before."""
    plan, packer = make_plan("decode", [make_row(3, [5], [8])], 4), make_packer()
    first, second, empty = packer.pack(plan), packer.pack(plan), empty_step(plan.bucket)
    assert not np.shares_memory(first.buffer, second.buffer)
    for once, again, padding in zip(*(step_arrays(step) for step in (first, second, empty)), strict=True):
        np.testing.assert_array_equal(once, again)
        assert np.shares_memory(once, first.buffer)
        assert (once.dtype, once.shape) == (padding.dtype, padding.shape)


def test_a_buffer_holds_each_array_once_and_nothing_else() -> None:
    step = empty_step(Bucket("prefill", 8, 4, 5), NUM_SLOTS)
    step.buffer[:] = np.arange(len(step.buffer))
    values = np.concatenate([array.view(np.int32).ravel() for array in step_arrays(step)])
    assert values.tolist() == list(range(len(step.buffer)))


def test_a_jitted_step_finds_in_the_buffer_what_was_packed() -> None:
    rows = [
        make_row(3, [5], [8], temperature=0.5, top_p=0.9, seed=2**63 - 1, seat=3, repetition_penalty=1.5, logprobs=4),
        make_row(4, [6], [1, 2], presence_penalty=-1.5, frequency_penalty=0.25, min_tokens=1, stop_ids=[7]),
    ]
    plan = make_plan("decode", rows, 4)
    packed = make_packer().pack(plan)
    found = jax.jit(split, static_argnums=1)(packed.buffer, plan.bucket)
    for array, other in zip(jax.tree.leaves(found), step_arrays(packed), strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other)


def test_a_packer_packs_each_plan_as_a_new_one_would() -> None:
    """What it keeps of one plan never shows in the next: rows come, go, change places, and grow by pages."""
    rng, packer = np.random.default_rng(0), make_packer()
    rows = [
        make_row(3, [5], [8], temperature=1.0, seed=7),
        make_row(5, [6], [1, 2], temperature=0.0, logprobs=2, repetition_penalty=2.0),
        make_row(6, [7, 8], [3, 4, 5], temperature=0.5, top_k=3, min_tokens=1, stop_ids=[1]),
        make_row(0, [1, 2, 3, 4], [9], temperature=0.7, samples=False),
    ]
    for _ in range(60):
        place = int(rng.integers(4))
        pages = np.append(rows[place].pages[:3], rng.integers(1, 99)).astype(np.int32)
        # A request that is retracted and let in again may get another seat.
        rows[place] = rows[place]._replace(pages=pages, seat=int(rng.integers(3)))
        chosen = [rows[place] for place in rng.permutation(4)[: rng.integers(1, 5)]]
        plan = make_plan("prefill", chosen, 8, num_rows=int(rng.choice([4, 6])))
        for array, other in zip(step_arrays(packer.pack(plan)), step_arrays(make_packer().pack(plan)), strict=True):
            np.testing.assert_array_equal(array, other)


def test_the_same_requests_in_other_seats() -> None:
    """As after a retraction: all else of the sampling values is as it was."""
    packer, row = make_packer(), make_row(3, [5], [8], seat=1, presence_penalty=0.5)
    assert packer.pack(make_plan("decode", [row], 4)).sampling.seat.tolist() == [1, 0, 0, 0]
    assert packer.pack(make_plan("decode", [row._replace(seat=2)], 4)).sampling.seat.tolist() == [2, 0, 0, 0]


def test_sampling_rows() -> None:
    rows = [
        make_row(3, [5], [8], temperature=0.5, top_k=7, top_p=0.9, min_p=0.25, seed=2**63 - 1),
        make_row(9, [5], [8], temperature=2.0, top_k=-1, seed=2**32 + 5),
        make_row(9, [5], [8], temperature=0.0, top_k=7, top_p=0.9, min_p=0.25, seed=9),
    ]
    sampling = make_packer().pack(make_plan("decode", rows, 4)).sampling
    assert sampling.temperature.tolist() == [0.5, 2.0, 0.0, 0.0]
    assert sampling.top_k.tolist() == [7, 0, 0, 0]
    assert sampling.top_p.tolist() == [np.float32(0.9), 1.0, 1.0, 1.0]
    assert sampling.min_p.tolist() == [0.25, 0.0, 0.0, 0.0]
    assert sampling.seed[:2].tolist() == [[2**32 - 1, 2**31 - 1], [5, 1]]
    assert sampling.position.tolist() == [4, 10, 10, 0]
    assert not sampling.sample_index.any()
    assert not any(array.any() for array in (sampling.adjusts, sampling.min_len, sampling.presence_penalty))
    assert sampling.repetition_penalty.tolist() == [1.0] * 4
    assert sampling.num_logprobs.tolist() == [-1] * 4


def test_what_changes_logits_and_what_is_told_of_them() -> None:
    rows = [
        make_row(3, [5], [8], seat=2, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logprobs=0),
        make_row(9, [5], [8], seat=0, min_tokens=4, stop_ids=[3], logprobs=20),
        make_row(9, [5], [8], seat=1, min_tokens=4),  # nothing ends it early anyway
        make_row(9, [5], [8], seat=3, logit_bias={3: 1.5}, samples=False),
        make_row(9, [5], [8], seat=4, logit_bias={3: 1.5}, temperature=0.0),
    ]
    sampling = make_packer().pack(make_plan("decode", rows, 6, num_rows=6)).sampling
    assert sampling.seat.tolist() == [2, 0, 1, 0, 4, 0]
    assert sampling.adjusts.tolist() == [1, 0, 0, 0, 1, 0]
    assert sampling.presence_penalty.tolist() == [0.5, 0, 0, 0, 0, 0]
    assert sampling.frequency_penalty.tolist() == [-0.5, 0, 0, 0, 0, 0]
    assert sampling.repetition_penalty.tolist() == [1.5, 1, 1, 1, 1, 1]
    assert sampling.min_len.tolist() == [0, 14, 0, 0, 0, 0]
    assert sampling.num_logprobs.tolist() == [0, 20, -1, -1, -1, -1]


@pytest.mark.parametrize(("penalty", "packed"), [(1e-300, 1e-6), (1e300, 1e6)])
def test_a_repetition_penalty_beyond_32_bits_keeps_logits_finite(penalty: float, packed: float) -> None:
    [row] = [make_row(3, [5], [8], repetition_penalty=penalty)]
    assert make_packer().pack(make_plan("decode", [row], 1)).sampling.repetition_penalty[0] == np.float32(packed)


def test_sampling_values_beyond_32_bits_mean_the_same_as_the_largest_ones() -> None:
    sampling = (
        make_packer().pack(make_plan("decode", [make_row(3, [5], [8], temperature=1e300, top_k=2**40)], 1)).sampling
    )
    assert sampling.temperature[0] == np.finfo(np.float32).max
    assert sampling.top_k[0] == 2**31 - 1


def test_a_chunk_that_samples_nothing_is_greedy() -> None:
    rows = [make_row(0, [1, 2, 3, 4], [8], temperature=1.0, top_k=3, samples=False), make_row(0, [1], [2])]
    sampling = make_packer().pack(make_plan("prefill", rows, 8)).sampling
    assert sampling.temperature.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert sampling.top_k.tolist() == [0, 0, 0, 0]


def test_copies_are_padded_to_the_rows_of_the_bucket() -> None:
    rows = [make_row(3, [1], [7]), make_row(0, [1], [2]), make_row(6, [1], [4, 9])]
    rows[0] = rows[0]._replace(copy=PageCopy(source=5, target=7, num_tokens=3))
    rows[2] = rows[2]._replace(copy=PageCopy(source=8, target=9, num_tokens=2))
    plan = make_plan("prefill", rows, 64)
    copies = pack_copies(plan, num_pages=20)
    assert copies.sources.tolist() == [5, 8, 0, 0]
    assert copies.targets.tolist() == [7, 9, 20, 20]
    assert plan.bucket.copies == Bucket("copy", 0, 4, 1)
    padding = empty_copies(4, num_pages=20)
    for packed, empty in zip(vars(copies).values(), vars(padding).values(), strict=True):
        assert (packed.shape, packed.dtype) == (empty.shape, empty.dtype)
