"""Padding writes are dropped; a negative index would wrap around and hit the last slot."""

import jax.numpy as jnp
import numpy as np
import pytest

from radix_jax.arrays import StepInputs
from radix_jax.pallas_kernels.paged_attention import write_kv
from radix_jax.plan import Bucket, StepPlan, StepRow
from radix_jax.request import Request, SamplingParams
from radix_jax.runner.pack import Packer, empty_step

# Pages and a width that every backend can do.
NUM_LAYERS, NUM_PAGES, PAGE_SIZE, WIDTH = 2, 6, 8, 128
NUM_SLOTS = NUM_LAYERS * NUM_PAGES * PAGE_SIZE
LAST_PAGE = NUM_PAGES - 1
BACKENDS = ("xla", "pallas_interpret", "pallas_tpu_interpret")


def packed() -> StepInputs:
    """3 rows in a bucket of 8; one of them fills the last slot of the last page."""
    rows = []
    for i, (start, pages) in enumerate([(2, [3]), (15, [1, LAST_PAGE]), (8, [2, 4])]):
        request = Request(
            request_id=str(i),
            token_ids=np.arange(start + 1, dtype=np.int32),
            sampling=SamplingParams(),
            max_tokens=1,
            stop_ids=frozenset(),
            seed=0,
            arrival=i,
        )
        ids = np.array([9], np.int32)
        rows.append(StepRow(request=request, token_ids=ids, start=start, pages=np.array(pages, np.int32), samples=True))
    plan = StepPlan(kind="decode", rows=tuple(rows), bucket=Bucket("decode", 8, 8, 4), num_prompt_rows=0)
    return Packer(page_size=PAGE_SIZE, num_slots=NUM_SLOTS).pack(plan).inputs


def changed_slots(write_slots: np.ndarray, layer: int, backend: str) -> list[int]:
    """Slots, over all layers, that writing -1 to `write_slots` of a layer changes in a pool of their numbers."""
    numbers = np.repeat(np.arange(NUM_SLOTS, dtype=np.float32), WIDTH).reshape(-1, PAGE_SIZE, WIDTH)
    new = -jnp.ones((len(write_slots), 1, WIDTH // 2))
    slots, offset = jnp.asarray(write_slots), layer * NUM_PAGES
    pool = write_kv(jnp.asarray(numbers), new, new, slots, page_offset=offset, backend=backend)
    return np.flatnonzero((np.asarray(pool) != numbers).any(axis=2)).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_rows_and_five_pads_change_three_slots_of_each_layer(backend: str) -> None:
    slots = np.asarray(packed().write_slots)
    assert len(slots) == 8
    expected = [4 * PAGE_SIZE, 3 * PAGE_SIZE + 2, LAST_PAGE * PAGE_SIZE + 7]
    for layer in range(NUM_LAYERS):
        per_layer = layer * NUM_PAGES * PAGE_SIZE
        assert changed_slots(slots, layer, backend) == [per_layer + slot for slot in sorted(expected)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bucket_of_padding_changes_nothing(backend: str) -> None:
    slots = np.asarray(empty_step(Bucket("prefill", 64, 8, 4), NUM_SLOTS).inputs.write_slots)
    assert [changed_slots(slots, layer, backend) for layer in range(NUM_LAYERS)] == [[], []]


def test_the_fault_is_real() -> None:
    """Were padding -1, the last slot of the pool would be lost."""
    numbers = jnp.arange(NUM_SLOTS, dtype=jnp.float32)
    assert numbers.at[jnp.array([-1])].set(-1.0, mode="drop")[-1] == -1.0
