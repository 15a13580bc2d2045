"""The TPU write kernel, interpreted on the CPU, against plain assignments: all else in the pool stays bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpu_interpreter import INTERPRET, assert_no_race

from radix_jax.pallas_kernels.paged_attention.backends import UnsupportedOption
from radix_jax.pallas_kernels.paged_attention.tpu_write import choose_block_len, find_runs, write_kv_tpu

NUM_LAYERS, NUM_PAGES = 2, 24
HEADS, HEAD_DIM, WIDTH = 2, 80, 384
PADDING = 10**6


def bits(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"uint{array.dtype.itemsize * 8}")


def assert_written(
    slots: list[int],
    *,
    page_size: int,
    dtype: str,
    scaled: bool = False,
    factor: float = 1.0,
    right_slots: list[int] | None = None,
) -> None:
    """A write into the second layer. right_slots: what it is compared with; None: slots."""
    rng = np.random.default_rng(0)
    shape = (NUM_LAYERS * NUM_PAGES, page_size, WIDTH)
    pool = rng.choice([np.nan, 1.0, -2.0], shape).astype(jnp.dtype(dtype))
    k, v = (factor * rng.standard_normal((len(slots), HEADS, HEAD_DIM), np.float32) for _ in range(2))
    scales = np.asarray([[0.5, 2.0], [1.0, 4.0]], np.float32) if scaled else np.ones((HEADS, 2), np.float32)
    written = write_kv_tpu(
        jnp.asarray(pool),
        jnp.asarray(k),
        jnp.asarray(v),
        jnp.asarray(slots, jnp.int32),
        page_offset=NUM_PAGES,
        kv_scales=jnp.asarray(scales) if scaled else None,
        interpret=INTERPRET,
    )
    want = pool.copy()
    largest = float(jnp.finfo(dtype).max)
    for token, slot in enumerate(right_slots or slots):
        if slot >= PADDING:
            continue
        lanes = np.stack([k[token] / scales[:, :1], v[token] / scales[:, 1:]], axis=1).reshape(-1)
        if "float8" in dtype:
            lanes = np.clip(lanes, -largest, largest)
        # What is beyond the heads is undefined in a token that is written: 0 here.
        want[NUM_PAGES + slot // page_size, slot % page_size] = np.pad(lanes, (0, WIDTH - len(lanes))).astype(
            pool.dtype
        )
    np.testing.assert_array_equal(bits(written), bits(want))


def padding(count: int) -> list[int]:
    return [PADDING + i for i in range(count)]


@pytest.mark.parametrize(
    ("dtype", "page_size", "slots"),
    [
        # A prefill from the middle of a group to that of another, a row of whole groups, single tokens, the last slot.
        ("bfloat16", 16, [*range(21, 50), *range(64, 80), 3, 200, NUM_PAGES * 16 - 1, 0, *padding(3)]),
        # Two tokens of a group that do not follow each other, and one of it in front of another's.
        ("float32", 8, [4, 100, 6, 5, 20, 21, *padding(1)]),
        # Blocks of 128 tokens, of which the third has the memory of the first.
        ("bfloat16", 16, [*range(5, 325)]),
    ],
)
def test_write(dtype: str, page_size: int, slots: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert_written(slots, page_size=page_size, dtype=dtype)
    assert_no_race(capsys)


def test_float8_is_scaled_and_cut_to_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert_written([*range(40, 70), 5, *padding(2)], page_size=32, dtype="float8_e4m3fn", scaled=True, factor=200.0)
    assert_no_race(capsys)


def test_a_wrong_slot_shows() -> None:
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_written([5, 9], page_size=8, dtype="float32", right_slots=[5, 10])


def test_pools_that_are_refused() -> None:
    with pytest.raises(UnsupportedOption, match="page_size"):
        assert_written([5], page_size=1, dtype="float32")


@settings(max_examples=100)
@given(data=st.data(), group=st.sampled_from([8, 32]))
def test_runs_are_those_of_a_plain_loop(data: st.DataObject, group: int) -> None:
    block_len, num_slots = 16, 256
    starts = data.draw(st.lists(st.integers(0, num_slots - 1), max_size=6), "where rows begin")
    slots = []
    for start in starts:
        length = data.draw(st.integers(1, 20), "tokens of a row")
        slots += [slot for slot in range(start, min(start + length, num_slots)) if slot not in slots]
    slots = slots[:60] + [num_slots + i for i in range(60 - len(slots))]
    find = jax.jit(find_runs, static_argnames=("num_slots", "group", "block_len"))
    runs = find(jnp.asarray(slots, jnp.int32), num_slots=num_slots, group=group, block_len=block_len)
    tokens, lens, first_slots, firsts, meets = (np.asarray(x) for x in runs)
    right: list[list[int]] = []
    for token, slot in enumerate(slots):
        if slot >= num_slots:
            continue
        if right and right[-1][-1] == token - 1 and slots[token - 1] == slot - 1 and slot % group:
            right[-1].append(token)
        else:
            right.append([token])
    given_runs = [list(range(tokens[i], tokens[i] + lens[i])) for i in range(firsts[-1])]
    assert given_runs == right
    assert [first_slots[i] for i in range(len(right))] == [slots[run[0]] for run in right]
    # A run is of the block in which it ends.
    blocks = [run[-1] // block_len for run in right]
    for block, meet in enumerate(meets):
        here = [i for i, of in enumerate(blocks) if of == block]
        assert here == list(range(firsts[block], firsts[block + 1]))
        groups = [slots[run[0]] // group for run in right]
        near = [groups[i] for i, of in enumerate(blocks) if of in (block - 1, block)]
        assert meet == any(near.count(groups[i]) > 1 for i in here)


def test_rows_of_a_step_do_not_meet() -> None:
    """An engine's step, whose rows have pages of their own, is never done one by one."""
    slots = [*range(19, 90), *range(160, 200), 301, 410, *range(512, 640)]
    runs = find_runs(jnp.asarray(slots, jnp.int32), num_slots=1000, group=8, block_len=128)
    assert not np.asarray(runs.meets).any()


def test_blocks_are_no_longer_than_need_be() -> None:
    assert choose_block_len(1, 2048, "bfloat16") == 8
    assert choose_block_len(64, 2048, "bfloat16") == 64
    assert choose_block_len(65, 1024, "bfloat16") == 128
    assert choose_block_len(65, 2048, "bfloat16") == 64
    assert choose_block_len(4096, 16384, "bfloat16") == 8


@pytest.mark.slow
def test_any_slots(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of any length in any order, over several blocks."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        slots: list[int] = []
        for page in rng.permutation(NUM_PAGES // 4):
            first = page * 64 + int(rng.integers(0, 40))
            slots += range(first, first + int(rng.integers(1, 64 - first % 64)))
        slots = (slots + padding(300))[:300]
        assert_written(slots, page_size=16, dtype=("bfloat16", "float32")[seed % 2])
    assert_no_race(capsys)
