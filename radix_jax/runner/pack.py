"""StepPlan -> one int32 buffer that holds StepInputs and SamplingInputs, padded to the plan's bucket; and PageCopies.

One buffer, because sending an array costs the host as much as packing all of them. A fresh one for each step, because
`device_put` may alias host memory that a queued step still reads.
"""

from itertools import accumulate, zip_longest
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from radix_jax.arrays import Array, PageCopies, SamplingInputs, StepInputs
from radix_jax.plan import Bucket, StepPlan
from radix_jax.request import Request

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MAX_INT32 = np.iinfo(np.int32).max
_SAMPLING_FIELDS = 15  # numbers a row, at the buffer's end
# Logits stay finite through these penalties.
_REPETITION_RANGE = 1e-6, 1e6


class PackedStep(NamedTuple):
    """The buffer of a step, and what it holds as views of it."""

    buffer: Int32[np.ndarray, " N"]
    inputs: StepInputs
    sampling: SamplingInputs


def buffer_len(bucket: Bucket) -> int:
    """Numbers in the buffer of a step."""
    return 4 * bucket.num_tokens + bucket.num_rows * (bucket.num_pages + 4 + _SAMPLING_FIELDS) + 1


def split(buffer: Int32[Array, " N"], bucket: Bucket) -> tuple[StepInputs, SamplingInputs]:
    """What a buffer of a bucket holds; the same for numpy, as views, and inside a jitted step."""
    tokens, rows, num_pages = bucket.num_tokens, bucket.num_rows, bucket.num_pages
    of_inputs = tokens, tokens, rows * num_pages, rows, rows + 1, tokens, tokens, rows, rows
    lens = *of_inputs, *[rows] * 4, 2 * rows, *[rows] * 9
    ends = accumulate(lens)
    parts = [buffer[end - length : end] for length, end in zip(lens, ends, strict=True)]
    token_ids, positions, page_table, kv_lens, cu_q_lens, write_slots, token_src, next_ids, num_prompt = parts[:9]
    temperature, top_k, top_p, min_p, seed, sample_index, position, seat = parts[9:17]
    repetition_penalty, presence_penalty, frequency_penalty, min_len, adjusts, num_logprobs = parts[17:]
    inputs = StepInputs(
        token_ids=token_ids,
        positions=positions,
        page_table=page_table.reshape(rows, num_pages),
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        write_slots=write_slots,
        token_src=token_src,
        next_ids=next_ids,
        num_prompt_logprobs=num_prompt,
    )
    sampling = SamplingInputs(
        temperature=temperature.view(np.float32),
        top_k=top_k,
        top_p=top_p.view(np.float32),
        min_p=min_p.view(np.float32),
        seed=seed.view(np.uint32).reshape(rows, 2),
        sample_index=sample_index,
        position=position,
        seat=seat,
        repetition_penalty=repetition_penalty.view(np.float32),
        presence_penalty=presence_penalty.view(np.float32),
        frequency_penalty=frequency_penalty.view(np.float32),
        min_len=min_len,
        adjusts=adjusts,
        num_logprobs=num_logprobs,
    )
    return inputs, sampling


def empty_step(bucket: Bucket, num_slots: int = 0) -> PackedStep:
    """A step of padding alone, whose rows are greedy.

    num_slots: slots of the whole pool, all layers; padding slots start there.
    """
    buffer = np.zeros(buffer_len(bucket), np.int32)
    inputs, sampling = split(buffer, bucket)
    inputs.write_slots[:] = np.arange(num_slots, num_slots + bucket.num_tokens, dtype=np.int32)
    assert inputs.token_src is not None
    assert inputs.num_prompt_logprobs is not None
    inputs.token_src[:] = inputs.num_prompt_logprobs[:] = -1
    sampling.top_p[:] = 1.0
    sampling.repetition_penalty[:] = 1.0
    sampling.num_logprobs[:] = -1
    return PackedStep(buffer, inputs, sampling)


class Packer:
    """Packs plans. Keeps page tables and sampling values of the last one, since most rows come again as they were.

    num_slots: slots of the whole pool, all layers.
    """

    def __init__(self, *, page_size: int, num_slots: int) -> None:
        self._page_size = page_size
        self._num_slots = num_slots
        self._page_table: Int32[Array, "B P"] = np.zeros((0, 0), np.int32)  # only read: it is part of a sent buffer
        self._row_pages: tuple[np.ndarray, ...] = ()  # what the table's rows were made from
        # What the sampling values were made from.
        self._samplers: tuple[Request | None, ...] = ()
        self._seats: tuple[int, ...] = ()
        self._sampling_values: Int32[np.ndarray, " N"] = np.empty(0, np.int32)

    def pack(self, plan: StepPlan) -> PackedStep:
        """The plan's rows in its bucket."""
        packed = empty_step(plan.bucket, self._num_slots)
        inputs, num_rows = packed.inputs, len(plan.rows)
        requests, token_ids, row_starts, row_pages, samples, sources, _, seats, _, asks = zip(*plan.rows, strict=True)
        starts = np.array(row_starts, np.int32)
        q_lens = np.fromiter(map(len, token_ids), np.int32, num_rows)
        ends = q_lens.cumsum()
        num_tokens = int(ends[-1])
        inputs.cu_q_lens[1 : num_rows + 1] = ends
        inputs.cu_q_lens[num_rows + 1 :] = num_tokens
        inputs.kv_lens[:num_rows] = starts + q_lens
        inputs.token_ids[:num_tokens] = np.concatenate(token_ids)
        assert inputs.token_src is not None
        inputs.token_src[ends - q_lens] = [-1 if source is None else source for source in sources]
        token_rows = np.repeat(np.arange(num_rows), q_lens)
        positions = np.arange(num_tokens, dtype=np.int32) + (starts - ends + q_lens)[token_rows]
        inputs.positions[:num_tokens] = positions
        self._fill_page_table(inputs.page_table, row_pages)
        pages = inputs.page_table[token_rows, positions // self._page_size]
        inputs.write_slots[:num_tokens] = pages * self._page_size + positions % self._page_size
        if max(asks) >= 0:
            _fill_prompt_logprobs(inputs, plan)
        samplers = requests if all(samples) else tuple(row.request if row.samples else None for row in plan.rows)
        self._fill_sampling(packed, samplers, seats)
        return packed

    def _fill_page_table(self, page_table: Int32[Array, "B P"], row_pages: tuple[np.ndarray, ...]) -> None:
        """Take the last step's table over, but for rows whose pages are another array: a plan's arrays never change."""
        before = self._row_pages if self._page_table.shape == page_table.shape else ()
        pairs = zip_longest(row_pages, before[: len(row_pages)])
        changed = [row for row, (pages, pages_before) in enumerate(pairs) if pages is not pages_before]
        width = max(map(len, row_pages))
        if len(changed) < len(row_pages):
            page_table[: len(row_pages), :width] = self._page_table[: len(row_pages), :width]
        for row in changed:
            num_pages = len(row_pages[row])
            page_table[row, :num_pages] = row_pages[row]
            page_table[row, num_pages:width] = 0
        self._page_table, self._row_pages = page_table, row_pages

    def _fill_sampling(self, packed: PackedStep, samplers: tuple[Request | None, ...], seats: tuple[int, ...]) -> None:
        """How each row's next token is chosen. samplers: the request of each row that samples one."""
        sampling = packed.sampling
        values = packed.buffer[-_SAMPLING_FIELDS * len(packed.inputs.kv_lens) :]
        is_known = samplers == self._samplers and seats == self._seats
        if is_known and len(values) == len(self._sampling_values):
            values[:] = self._sampling_values
        else:
            for row, (request, seat) in enumerate(zip(samplers, seats, strict=True)):
                if request is not None:
                    _fill_sampler(sampling, row, request, seat)
            self._samplers, self._seats, self._sampling_values = samplers, seats, values.copy()
        sampling.position[:] = packed.inputs.kv_lens


def _fill_prompt_logprobs(inputs: StepInputs, plan: StepPlan) -> None:
    assert inputs.next_ids is not None
    assert inputs.num_prompt_logprobs is not None
    for place, row in enumerate(plan.rows):
        inputs.num_prompt_logprobs[place] = row.num_prompt_logprobs
        if row.num_prompt_logprobs >= 0 and row.end < row.request.prompt_len:
            inputs.next_ids[place] = row.request.token_ids[row.end]


def _fill_sampler(sampling: SamplingInputs, row: int, request: Request, seat: int) -> None:
    """All that stays the same from step to step; what a row does not ask for stays as it is in padding."""
    params = request.sampling
    if params.temperature > 0.0:
        sampling.temperature[row] = min(params.temperature, _MAX_FLOAT32)
        sampling.top_k[row] = min(max(params.top_k, 0), _MAX_INT32)
        sampling.top_p[row] = params.top_p
        sampling.min_p[row] = params.min_p
        sampling.seed[row] = request.seed & 0xFFFFFFFF, request.seed >> 32
        sampling.sample_index[row] = request.sample_index
    sampling.seat[row] = seat
    if request.adjusts_logits:
        sampling.adjusts[row] = 1
        sampling.repetition_penalty[row] = np.clip(params.repetition_penalty, *_REPETITION_RANGE)
        sampling.presence_penalty[row] = params.presence_penalty
        sampling.frequency_penalty[row] = params.frequency_penalty
    sampling.min_len[row] = request.min_len
    if params.logprobs is not None:
        sampling.num_logprobs[row] = params.logprobs


def empty_copies(num_rows: int, num_pages: int) -> PageCopies:
    """Padding alone. num_pages: pages of one layer."""
    return PageCopies(sources=np.zeros(num_rows, np.int32), targets=np.full(num_rows, num_pages, np.int32))


def pack_copies(plan: StepPlan, num_pages: int) -> PageCopies:
    """The page copies that the plan's step begins with. num_pages: pages of one layer."""
    copies = empty_copies(plan.bucket.num_rows, num_pages)
    for place, copy in enumerate(plan.copies):
        copies.sources[place], copies.targets[place] = copy.source, copy.target
    return copies
