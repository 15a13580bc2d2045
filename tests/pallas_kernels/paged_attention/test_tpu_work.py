"""The work list of the TPU kernels against a plain loop."""

import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radix_jax.pallas_kernels.paged_attention.tpu_work import (
    FIRST_BIT,
    ROW_SHIFT,
    TILE_MASK,
    decode_work,
    flat_items,
    num_items_bound,
)

TABLE_LEN, TILE_LEN, NUM_SPARE = 1000, 128, 3


def listed(kv_lens: list[int], q_lens: list[int], sliding_window: int | None) -> list[tuple[int, int, bool]]:
    """(row, tile, whether it is the row's first) of all items, row after row."""
    items = []
    for row, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True)):
        if not q_len or not kv_len:
            continue
        seen = range(max(0, kv_len - (sliding_window or kv_len)), kv_len)
        tiles = sorted({position // TILE_LEN for position in seen})
        items += [(row, tile, tile == tiles[0]) for tile in tiles]
    return items


@settings(max_examples=100)
@given(
    rows=st.lists(st.tuples(st.integers(0, TABLE_LEN), st.booleans()), min_size=4, max_size=4),
    sliding_window=st.sampled_from([None, 1, 127, 128, 300, 5000]),
)
# Windows that begin with a tile's last token, and with its first.
@example(rows=[(128, True), (129, True), (256, True), (257, True)], sliding_window=1)
@example(rows=[(255, True), (256, True), (383, True), (384, True)], sliding_window=128)
def test_items_are_those_of_a_plain_loop(rows: list[tuple[int, bool]], sliding_window: int | None) -> None:
    """Rows without a token or without a query, in any place, have none."""
    kv_lens = [kv_len for kv_len, _ in rows]
    q_lens = [int(asks and kv_len > 0) for kv_len, asks in rows]
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    work = decode_work(
        jnp.asarray(kv_lens, jnp.int32),
        jnp.asarray(cu_q_lens),
        table_len=TABLE_LEN,
        tile_len=TILE_LEN,
        num_spare=NUM_SPARE,
        sliding_window=sliding_window,
    )
    items, row_ids, lens, tokens = (np.asarray(x) for x in (work.items, work.row_ids, work.kv_lens, work.tokens))
    num_items, num_rows = np.asarray(work.counts)
    assert items.shape == (num_items_bound(4, TABLE_LEN, TILE_LEN, NUM_SPARE),)
    assert num_rows == sum(q_lens)
    given_items = [
        (int(row_ids[item >> ROW_SHIFT]), int(item & TILE_MASK), bool(item & FIRST_BIT)) for item in items[:num_items]
    ]
    assert given_items == listed(kv_lens, q_lens, sliding_window)
    # Rows are numbered through those with work, in their order.
    assert sorted({int(item) >> ROW_SHIFT for item in items[:num_items]}) == list(range(num_rows))
    for place in range(num_rows):
        assert lens[place] == kv_lens[row_ids[place]]
        assert tokens[place] == cu_q_lens[row_ids[place]]
    # What a kernel reads ahead behind the last item has no token.
    behind = items[num_items : num_items + NUM_SPARE]
    assert len(behind) == NUM_SPARE
    assert (lens[behind >> ROW_SHIFT] == 0).all()
    assert (behind & TILE_MASK == 0).all()


def test_a_full_table_fits() -> None:
    work = decode_work(
        jnp.full(3, 256, jnp.int32), jnp.arange(4, dtype=jnp.int32), table_len=256, tile_len=128, num_spare=2
    )
    assert work.items.shape == (8,)
    assert list(np.asarray(work.counts)) == [6, 3]


def test_flat_items() -> None:
    rows, places = flat_items(jnp.asarray([2, 0, 3], jnp.int32), 7)
    assert list(np.asarray(rows)) == [0, 0, 2, 2, 2, 3, 3]
    assert list(np.asarray(places[:5])) == [0, 1, 0, 1, 2]
