"""One item of the decode kernel: a KV tile of one row, all kv heads."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float32

from radix_jax.pallas_kernels.paged_attention.tpu_copies import Index, Scalar, start_copies, wait_for, words_below
from radix_jax.pallas_kernels.paged_attention.tpu_decode_spec import (
    NUM_RESULTS,
    DecodeSpec,
    Item,
    Refs,
    num_live,
    read_item,
)
from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES, Slab, Window
from radix_jax.pallas_kernels.paged_attention.tpu_steps import NUM_COPY_STEPS, decode_steps
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import write_group

LN_2 = 0.6931471805599453
# Stands for minus infinity: exp2(x - NEG) is 0 and NEG - NEG is 0, where infinities would give NaN.
NEG = -1e30


def start_record(refs: Refs, item: Item, slot: Index) -> None:
    """Start the copy of a row's record, with its first item."""
    copy = pltpu.make_async_copy(
        refs.records.at[refs.tokens[item.row]], refs.record.at[item.record], refs.tiles.semaphores.at[slot]
    )
    pl.when((item.is_first != 0) & (item.num_tokens > 0))(copy.start)


def start_tile(spec: DecodeSpec, refs: Refs, item: Item, slot: Index, which: range) -> None:
    """Start those copies of an item's tile that are in `which`."""
    table_row = refs.row_ids[item.row] * spec.table_width
    num = spec.shape.copies_for(item.num_tokens)
    start_copies(spec.shape, refs.tiles, slot, table_row, item.tile, num, which)


def wait_for_results(spec: DecodeSpec, refs: Refs, row: Scalar) -> None:
    """Until what the last row in a row's slot gave is in HBM."""
    slot = jax.lax.bitwise_and(row, NUM_RESULTS - 1)
    wait_for(refs.out_rows.at[slot], refs.done.at[slot])
    if spec.return_lse:
        wait_for(refs.lse_rows.at[slot], refs.done.at[slot])
    if spec.writes:
        wait_for(refs.new_rows.at[slot, pl.ds(0, write_group(spec.pool_dtype))], refs.done.at[slot])


class ItemParts:
    """The computation of one item, part by part. The parts of a slab are far from each other in the code."""

    def __init__(self, spec: DecodeSpec, refs: Refs, index: Scalar, slot: Scalar, item: Item) -> None:
        self.spec, self.refs, self.item, self.slot = spec, refs, item, slot
        self.live = num_live(spec, item)
        self.is_first = item.is_first != 0
        self.seen_from = None
        if spec.sliding_window is not None:
            self.seen_from = item.num_tokens - spec.sliding_window
        ahead = spec.tiles.num_buffers - 1
        self.ahead_item = read_item(spec, refs, index + ahead)
        self.ahead_slot = jnp.where(slot == 0, ahead, slot - 1)
        self.scores: dict[tuple[int, int], list[jax.Array]] = {}
        self.weights: dict[int, tuple[jax.Array, jax.Array]] = {}
        self.sums: dict[int, list[jax.Array]] = {}

    def run(self) -> None:
        """All parts, and the results on their way where the item is the row's last."""
        self.refs.tiles.dirty[self.slot] = self.live
        for part, index in decode_steps(len(self.spec.layout.slabs), self.spec.chip.mxu_size):
            getattr(self, part)(index)
        pl.when(self.item.num_tokens <= self.spec.tiles.tile_len)(self._start_results)

    def copies(self, index: int) -> None:
        """A share of the copies of the tile that is next to be fetched."""
        num = self.spec.shape.num_copies
        which = range(num * index // NUM_COPY_STEPS, num * (index + 1) // NUM_COPY_STEPS)
        start_tile(self.spec, self.refs, self.ahead_item, self.ahead_slot, which)

    def record(self, _: int) -> None:
        """The copy of the record of the row that begins next."""
        start_record(self.refs, self.ahead_item, self.ahead_slot)

    def scores_low(self, index: int) -> None:
        """The scores of a slab, in the first half of the tile."""
        chunks = self.spec.chunks
        self.scores[index, 0] = self._scores(self.spec.layout.slabs[index], chunks[: len(chunks) // 2])

    def scores_high(self, index: int) -> None:
        """The scores of a slab, in the other half."""
        chunks = self.spec.chunks
        self.scores[index, 1] = self._scores(self.spec.layout.slabs[index], chunks[len(chunks) // 2 :])

    def _scores(self, slab: Slab, chunks: range) -> list[Float32[jax.Array, "M S"]]:
        """Of each chunk. One matmul for all kv heads: q is 0 in the lanes of heads that are not the row's."""
        if not chunks:
            return []
        rows = slice(chunks.start * LANES, chunks.stop * LANES)
        q, k = [], []
        for head in slab.heads:
            window = self.spec.layout.k_window(head)
            k.append(self._load(rows, window))
            q += [self._of_head(slab, head, self._q(slab, group)) for group in range(window.width // LANES)]
        scores = jax.lax.dot_general(
            jnp.concatenate(q, axis=1).astype(self.spec.compute_dtype),
            jnp.concatenate(k, axis=1),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return [scores[:, place * LANES : (place + 1) * LANES] for place in range(len(chunks))]

    def _of_head(self, slab: Slab, head: int, rows: jax.Array) -> jax.Array:
        """The rows of a kv head, 0 in the others."""
        if slab.num_heads == 1:
            return rows
        first = (head - slab.first_head) * self.spec.layout.group_size
        row = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        return jnp.where((row >= first) & (row < first + self.spec.layout.group_size), rows, 0.0)

    def _q(self, slab: Slab, group: int) -> Float32[jax.Array, "M D"]:
        start = group * self.spec.layout.num_rows + slab.row
        return self.refs.record[self.item.record, start : start + slab.num_rows]

    def _load(self, rows: slice, window: Window) -> jax.Array:
        x = self.refs.tiles.buffers[self.slot, rows, window.lanes].astype(self.spec.compute_dtype)
        spare_from = self.spec.layout.spare_from - window.start
        if spare_from >= window.width:
            return x
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.where(lane < spare_from, x.astype(jnp.float32), 0.0).astype(x.dtype)

    def _own(self, slab: Slab, parts: list[jax.Array]) -> jax.Array:
        """Rows of each kv head from its part."""
        row = jax.lax.broadcasted_iota(jnp.int32, parts[0].shape, 0)
        chosen = parts[0]
        for index, part in enumerate(parts[1:], start=1):
            chosen = jnp.where(row < index * self.spec.layout.group_size, chosen, part)
        return chosen

    def softmax(self, index: int) -> None:
        """Weights of a slab's tokens, and its running maximum and total."""
        slab, spec, refs = self.spec.layout.slabs[index], self.spec, self.refs
        scores = self.scores.pop((index, 0)) + self.scores.pop((index, 1))
        scores = [self._mask(self._cap(s), chunk) for chunk, s in enumerate(scores)]
        shape, is_first = scores[0].shape, self.is_first
        top, total = jnp.full(shape, NEG), jnp.zeros(shape)
        if spec.writes:
            top = jnp.broadcast_to(self._cap(self._new_score(slab)), shape)
            total = jnp.where(jax.lax.broadcasted_iota(jnp.int32, shape, 1) == 0, 1.0, 0.0)
        top = jnp.where(is_first, top, refs.top[slab.rows])
        total = jnp.where(is_first, total, refs.total[slab.rows])
        tile_top = _tree(jnp.maximum, scores).max(axis=1, keepdims=True)
        new_top = jnp.maximum(top, jnp.broadcast_to(tile_top, shape))
        weights = [jnp.exp2(s - new_top) for s in scores]
        decay = jnp.exp2(top - new_top)
        # Lane by lane; the lanes are summed when the row is done.
        refs.total[slab.rows] = total * decay + _tree(jnp.add, weights)
        refs.top[slab.rows] = new_top
        rounded = jnp.concatenate([w.astype(spec.compute_dtype) for w in weights], axis=1)
        self.weights[index] = rounded, decay

    def _cap(self, scores: jax.Array) -> jax.Array:
        return scores if self.spec.score_cap is None else self.spec.score_cap * jnp.tanh(scores)

    def _mask(self, scores: jax.Array, chunk: int) -> jax.Array:
        token = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        sees = token < self.live - chunk * LANES
        if self.seen_from is not None:
            sees &= token >= self.seen_from - chunk * LANES
        return jnp.where(sees, scores, NEG)

    def _new_score(self, slab: Slab) -> Float32[jax.Array, "M 1"]:
        num_groups = max(self.spec.layout.k_window(head).width for head in slab.heads) // LANES
        products = []
        for group in range(num_groups):
            k = self._own(slab, [self._new_lanes(slab, self.spec.layout.k_window(head), group) for head in slab.heads])
            products.append(self._q(slab, group) * k)
        return _tree(jnp.add, products).sum(axis=1, keepdims=True)

    def _new_lanes(self, slab: Slab, window: Window, group: int) -> Float32[jax.Array, "M D"]:
        """A lane group of the new token, for every row of a slab; zeros past the window."""
        if group >= window.width // LANES:
            return jnp.zeros((slab.num_rows, LANES), jnp.float32)
        row = self.spec.new_row + window.start // LANES + group
        return jnp.broadcast_to(self.refs.record[self.item.record, row : row + 1], (slab.num_rows, LANES))

    def values_low(self, index: int) -> None:
        """The weighted V of a slab, of the first half of the tile."""
        chunks = self.spec.chunks
        self.sums[index] = self._weighted(index, chunks[: len(chunks) // 2])

    def values_high(self, index: int) -> None:
        """The weighted V of the other half, and all of it into the running values and the results."""
        slab, spec, refs, chunks = self.spec.layout.slabs[index], self.spec, self.refs, self.spec.chunks
        parts = _tree(jnp.add, self.sums.pop(index) + self._weighted(index, chunks[len(chunks) // 2 :]))
        _, decay = self.weights.pop(index)
        total = jnp.broadcast_to(refs.total[slab.rows].sum(axis=1, keepdims=True), decay.shape)
        scale = 1.0 / total
        windows = [spec.layout.v_window(head) for head in slab.heads]
        starts = [sum(window.width for window in windows[:place]) for place in range(len(windows))]
        for group in range(spec.layout.out_width // LANES):
            lanes = slice(group * LANES, (group + 1) * LANES)
            before = jnp.zeros((slab.num_rows, LANES))
            if spec.writes:
                before = self._own(slab, [self._new_lanes(slab, window, group) for window in windows])
            before = jnp.where(self.is_first, before, refs.values[slab.rows, lanes])
            # A window that ends sooner adds nothing here.
            new = [
                parts[:, start + lanes.start : start + lanes.stop]
                if lanes.start < window.width
                else jnp.zeros_like(before)
                for window, start in zip(windows, starts, strict=True)
            ]
            values = before * decay + self._own(slab, new)
            refs.values[slab.rows, lanes] = values
            refs.out_rows[self.item.result, slab.rows, lanes] = (values * scale).astype(spec.out_dtype)
        if spec.return_lse:
            refs.lse_rows[self.item.result, slab.rows] = (refs.top[slab.rows] + jnp.log2(total)) * LN_2

    def _weighted(self, index: int, chunks: range) -> list[Float32[jax.Array, "M D"]]:
        """One matmul for the V windows of all kv heads, side by side; none without chunks."""
        if not chunks:
            return []
        rows = slice(chunks.start * LANES, chunks.stop * LANES)
        heads = self.spec.layout.slabs[index].heads
        v = jnp.concatenate([self._load(rows, self.spec.layout.v_window(head)) for head in heads], axis=1)
        return [jnp.dot(self.weights[index][0][:, rows], v, preferred_element_type=jnp.float32)]

    def write(self, _: int) -> None:
        """The tile rows around the new token's place, with the new token in them."""
        if not self.spec.writes:
            return
        spec, refs, dtype = self.spec, self.refs, self.spec.pool_dtype
        per_word, num_rows = 4 // jnp.dtype(dtype).itemsize, spec.new_rows
        # Anywhere in the tile where the new token belongs in another.
        place = jnp.clip(self.item.num_tokens - 1, 0, spec.tiles.tile_len - 1)
        first = pl.multiple_of(jax.lax.bitwise_and(place, -num_rows), num_rows)
        mask = words_below(place - first + 1, num_rows, dtype) & ~words_below(place - first, num_rows, dtype)
        for group in range(spec.layout.width // LANES):
            lanes = slice(group * LANES, (group + 1) * LANES)
            old = pltpu.bitcast(refs.tiles.buffers[self.slot, pl.ds(first, num_rows), lanes], jnp.int32)
            row = spec.words_row + group
            word = pltpu.bitcast(refs.record[self.item.record, row : row + 1], jnp.int32)
            new = jnp.broadcast_to(word, (num_rows // per_word, LANES))
            if jnp.dtype(dtype) == jnp.bfloat16:
                new = new | jax.lax.shift_right_logical(new, 16)
            merged = old ^ ((old ^ new) & mask)
            refs.new_rows[self.item.result, :, lanes] = pltpu.bitcast(merged, dtype)

    def _start_results(self) -> None:
        """Result and new token of a row that is done, to HBM."""
        spec, refs, row, slot = self.spec, self.refs, self.item.row, self.item.result
        token, done = refs.tokens[row], refs.done.at[slot]
        pltpu.make_async_copy(refs.out_rows.at[slot], refs.out.at[token], done).start()
        if spec.return_lse:
            pltpu.make_async_copy(refs.lse_rows.at[slot], refs.lse.at[token], done).start()
        if spec.writes:
            shift, group = spec.page_size.bit_length() - 1, write_group(spec.pool_dtype)
            position = refs.kv_lens[row] - 1
            entry = refs.row_ids[row] * spec.table_width + jax.lax.shift_right_logical(position, shift)
            page = refs.tiles.pages[entry] + refs.tiles.page_offset
            first = pl.multiple_of(jax.lax.bitwise_and(position, (spec.page_size - 1) & -group), group)
            place = refs.tiles.pool.at[page, pl.ds(first, group)]
            among = pl.multiple_of(jax.lax.bitwise_and(position, (spec.new_rows - 1) & -group), group)
            pltpu.make_async_copy(refs.new_rows.at[slot, pl.ds(among, group)], place, done).start()


def _tree(op: Any, parts: list[jax.Array]) -> jax.Array:
    """op over all parts, in pairs."""
    while len(parts) > 1:
        parts = [op(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]
