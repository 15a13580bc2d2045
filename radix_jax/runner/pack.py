"""StepPlan -> StepInputs, SamplingInputs and PageCopies: numpy, padded to the plan's bucket, fresh arrays each time.

Fresh, because `device_put` may alias host memory that a queued step still reads.
"""

import numpy as np

from radix_jax.arrays import PageCopies, SamplingInputs, StepInputs
from radix_jax.plan import Bucket, StepPlan

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MAX_INT32 = np.iinfo(np.int32).max


def empty_inputs(bucket: Bucket, num_slots: int = 0) -> StepInputs:
    """A bucket of padding alone. num_slots: slots of the whole pool, all layers; padding slots start there."""
    return StepInputs(
        token_ids=np.zeros(bucket.num_tokens, np.int32),
        positions=np.zeros(bucket.num_tokens, np.int32),
        page_table=np.zeros((bucket.num_rows, bucket.num_pages), np.int32),
        kv_lens=np.zeros(bucket.num_rows, np.int32),
        cu_q_lens=np.zeros(bucket.num_rows + 1, np.int32),
        write_slots=np.arange(num_slots, num_slots + bucket.num_tokens, dtype=np.int32),
        token_src=np.full(bucket.num_tokens, -1, np.int32),
    )


def pack_inputs(plan: StepPlan, *, page_size: int, num_slots: int) -> StepInputs:
    """The plan's rows as flat arrays, in its bucket. num_slots: slots of the whole pool, all layers."""
    rows, num_rows = plan.rows, len(plan.rows)
    inputs = empty_inputs(plan.bucket, num_slots)
    q_lens = np.array([len(row.token_ids) for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    for b, row in enumerate(rows):
        inputs.page_table[b, : len(row.pages)] = row.pages
    inputs.cu_q_lens[1 : num_rows + 1] = np.cumsum(q_lens)
    num_tokens = int(q_lens.sum())
    inputs.cu_q_lens[num_rows + 1 :] = num_tokens
    inputs.kv_lens[:num_rows] = starts + q_lens
    token_rows = np.repeat(np.arange(num_rows), q_lens)
    positions = np.arange(num_tokens, dtype=np.int32) + (starts - inputs.cu_q_lens[:num_rows])[token_rows]
    inputs.token_ids[:num_tokens] = np.concatenate([row.token_ids for row in rows])
    assert inputs.token_src is not None
    for b, row in enumerate(rows):
        if row.source is not None:
            inputs.token_src[inputs.cu_q_lens[b]] = row.source
    inputs.positions[:num_tokens] = positions
    pages = inputs.page_table[token_rows, positions // page_size]
    inputs.write_slots[:num_tokens] = pages * page_size + positions % page_size
    return inputs


def empty_copies(num_rows: int, num_pages: int) -> PageCopies:
    """Padding alone. num_pages: pages of one layer."""
    return PageCopies(sources=np.zeros(num_rows, np.int32), targets=np.full(num_rows, num_pages, np.int32))


def pack_copies(plan: StepPlan, num_pages: int) -> PageCopies:
    """The page copies that the plan's step begins with. num_pages: pages of one layer."""
    copies = empty_copies(plan.bucket.num_rows, num_pages)
    for place, copy in enumerate(plan.copies):
        copies.sources[place], copies.targets[place] = copy.source, copy.target
    return copies


def empty_sampling(num_rows: int) -> SamplingInputs:
    """Greedy rows."""
    return SamplingInputs(
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.zeros((num_rows, 2), np.uint32),
        sample_index=np.zeros(num_rows, np.int32),
        position=np.zeros(num_rows, np.int32),
    )


def pack_sampling(plan: StepPlan) -> SamplingInputs:
    """How each row's next token is chosen; padding rows, and rows that sample nothing, are greedy."""
    sampling = empty_sampling(plan.bucket.num_rows)
    for b, row in enumerate(plan.rows):
        params = row.request.sampling
        if not row.samples or params.temperature == 0.0:
            continue
        sampling.temperature[b] = min(params.temperature, _MAX_FLOAT32)
        sampling.top_k[b] = min(max(params.top_k, 0), _MAX_INT32)
        sampling.top_p[b] = params.top_p
        sampling.min_p[b] = params.min_p
        sampling.seed[b] = row.request.seed & 0xFFFFFFFF, row.request.seed >> 32
        sampling.position[b] = row.end
    return sampling
