"""The extend kernel's inside: steps of an item, each a chunk of a q tile's rows against a KV tile.

A step is one matmul for the scores, a softmax, and one matmul for the values. Scores depend on nothing of the step
before, not even across items: the matrix units compute them during its softmax. Steps alternate between two sets of
memory, so that the compiler sees it. It looks ahead by so much only, so the order of the text counts: softmax, values,
then the scores of the next step. On a v5e, with 4 query heads of 128 on each of 2 kv heads, that makes 2,131 bundles
of two steps of 512 x 512, whose matmuls alone take 2,048; with the scores first it makes 2,472.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from radix_jax.pallas_kernels.paged_attention.tpu_copies import Ref, Scalar, TileBuffers
from radix_jax.pallas_kernels.paged_attention.tpu_extend_work import (
    KV_MASK,
    NUM_BUFFERS,
    TILE_SHIFT,
    ExtendSpec,
    k_start,
    v_start,
)
from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES, SUBLANES

# Below any score, and finite, as infinities would give NaN: of a row that has seen nothing yet.
LOWEST = -1e30
LN_2 = 0.6931471805599453
# Rows that the softmax is written down for at a time.
ROWS = 32


class ExtendRefs(NamedTuple):
    """Memory by name. scores, weights, decays, maxima, sums, values: a pair each, of even and of odd steps.

    tokens_of_rows: of each row of a chunk, its token in the chunk, in every lane.
    """

    items: Ref
    rows: Ref
    slots: Ref
    first_positions: Ref
    last_positions: Ref
    queries: Ref
    v_scales: Ref
    out: Ref
    lse: Ref | None
    tiles: TileBuffers
    q: Ref
    results: Ref
    log_sums: Ref
    scores: tuple[Ref, Ref]
    weights: tuple[Ref, Ref]
    decays: tuple[Ref, Ref]
    maxima: tuple[Ref, Ref]
    sums: tuple[Ref, Ref]
    values: tuple[Ref, Ref]
    tokens_of_rows: Ref
    q_semaphores: Ref
    done: Ref


class ExtendItem(NamedTuple):
    """tile, kv_tile: of the item. row: of the page table. first, last: positions of the q tile's outermost queries."""

    tile: Scalar
    kv_tile: Scalar
    row: Scalar
    first: Scalar
    last: Scalar


def read_item(refs: ExtendRefs, index: Any) -> ExtendItem:
    """The item at `index` of the work list."""
    word = refs.items[index]
    tile = jax.lax.shift_right_logical(word, TILE_SHIFT)
    kv_tile = jax.lax.bitwise_and(word, KV_MASK)
    return ExtendItem(tile, kv_tile, refs.rows[tile], refs.first_positions[tile], refs.last_positions[tile])


def num_live(spec: ExtendSpec, item: ExtendItem) -> Scalar:
    """Tokens of the item's KV tile that its queries see; 0 for the padding behind the last item."""
    return jnp.minimum(item.last + 1 - item.kv_tile * spec.tiles.tile_len, spec.tiles.tile_len)


def is_masked(spec: ExtendSpec, item: ExtendItem) -> jax.Array:
    """Whether some query of the item sees less than all of its KV tile."""
    begin = item.kv_tile * spec.tiles.tile_len
    masked = begin + spec.tiles.tile_len - 1 > item.first
    if spec.sliding_window is not None:
        masked = masked | (begin <= item.last - spec.sliding_window)
    return masked


class Place(NamedTuple):
    """Where a step's operands are: buffer of q, buffer of K and V, and the step."""

    q_slot: Scalar
    kv_slot: Scalar
    step: Scalar


def head_and_row(spec: ExtendSpec, step: Scalar) -> tuple[Scalar, Scalar]:
    """(kv head, first of its rows in the q tile) of a step."""
    shift = spec.tiles.chunks_per_head.bit_length() - 1
    head = jax.lax.shift_right_logical(step, shift)
    chunk = jax.lax.bitwise_and(step, spec.tiles.chunks_per_head - 1)
    return head, pl.multiple_of(chunk * spec.chunk_rows, 16)


def score(spec: ExtendSpec, refs: ExtendRefs, place: Place, side: int) -> None:
    """Scores of a step, in base 2 but for a soft cap, unmasked."""
    layout = spec.layout
    head, row = head_and_row(spec, place.step)
    start = pl.multiple_of(k_start(layout, head), LANES)
    k = refs.tiles.buffers[place.kv_slot, :, pl.ds(start, layout.q_width)].astype(spec.compute_dtype)
    last_window = k_start(layout, layout.num_kv_heads - 1) + layout.q_width
    if last_window > layout.spare_from:
        lane = jax.lax.broadcasted_iota(jnp.int32, k.shape, 1)
        k = jnp.where(lane < layout.spare_from - start, k.astype(jnp.float32), 0.0).astype(k.dtype)
    q = refs.q[place.q_slot, head, pl.ds(row, spec.chunk_rows), :]
    refs.scores[side][...] = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def weigh(spec: ExtendSpec, refs: ExtendRefs, item: ExtendItem, step: Scalar, side: int, *, masked: bool) -> None:
    """Weights of a step's tokens, running maximum and sum of its rows. Sums are kept by lanes."""
    pair = jax.lax.shift_right_logical(step, 1)
    tile_len = spec.tiles.tile_len
    first_token = jax.lax.bitwise_and(step, spec.tiles.chunks_per_head - 1) * spec.tiles.chunk_tokens
    for begin in range(0, spec.chunk_rows, ROWS):
        rows = pl.ds(begin, min(ROWS, spec.chunk_rows - begin))
        parts = [refs.scores[side][rows, lane : lane + LANES] for lane in range(0, tile_len, LANES)]
        if spec.score_cap is not None:
            parts = [jnp.tanh(part) * spec.score_cap for part in parts]
        seen = _seen(spec, item, refs.tokens_of_rows[rows, :] + first_token, len(parts)) if masked else None
        shown = parts if seen is None else [jnp.where(*pair, LOWEST) for pair in zip(seen, parts, strict=True)]
        top = shown[0]
        for part in shown[1:]:
            top = jnp.maximum(top, part)
        before = refs.maxima[side][pair, rows, :]
        now = jnp.maximum(before, jnp.broadcast_to(jnp.max(top, axis=1, keepdims=True), before.shape))
        decay = jnp.exp2(before - now)
        refs.maxima[side][pair, rows, :] = now
        refs.decays[side][rows, :] = decay
        total = refs.sums[side][pair, rows, :] * decay
        for index, part in enumerate(parts):
            weight = jnp.exp2(part - now)
            if seen is not None:
                # Of the scores as they are, which lie in memory; masked ones would be kept, and spill.
                weight = jnp.where(seen[index], weight, 0.0)
            total = total + weight
            lanes = slice(index * LANES, (index + 1) * LANES)
            refs.weights[side][rows, lanes] = weight.astype(spec.compute_dtype)
        refs.sums[side][pair, rows, :] = total


def _seen(spec: ExtendSpec, item: ExtendItem, token: jax.Array, num_parts: int) -> list[jax.Array]:
    """Of each lane group of the scores, which of them a query sees; none of what was never written."""
    lane = jax.lax.broadcasted_iota(jnp.int32, token.shape, 1)
    # Columns from a lane of the first group to the last that the query sees.
    reach = jnp.minimum(item.first + token, item.last) - item.kv_tile * spec.tiles.tile_len - lane
    seen = [reach >= index * LANES for index in range(num_parts)]
    if spec.sliding_window is None:
        return seen
    return [s & (reach < spec.sliding_window + index * LANES) for index, s in enumerate(seen)]


def add_values(spec: ExtendSpec, refs: ExtendRefs, kv_slot: Scalar, step: Scalar, side: int) -> None:
    """Add the weighted V of a step's tokens to its rows."""
    pair = jax.lax.shift_right_logical(step, 1)
    head, _ = head_and_row(spec, step)
    start = pl.multiple_of(v_start(spec.layout, head), LANES)
    v = refs.tiles.buffers[kv_slot, :, pl.ds(start, spec.layout.out_width)].astype(spec.compute_dtype)
    added = jax.lax.dot_general(
        refs.weights[side][...], v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    decay = refs.decays[side][...]
    if spec.layout.out_width > LANES:
        decay = jnp.concatenate([decay] * (spec.layout.out_width // LANES), axis=1)
    refs.values[side][pair] = refs.values[side][pair] * decay + added


def run_item(spec: ExtendSpec, refs: ExtendRefs, item: ExtendItem, here: Place, next_place: Place) -> None:
    """All steps of an item. The scores of its first are there; it leaves those of `next_place`, of the item behind."""

    def steps(masked: bool) -> None:
        def pair_of_steps(pair: Scalar, carry: None) -> None:
            even = pair * 2
            weigh(spec, refs, item, even, 0, masked=masked)
            add_values(spec, refs, here.kv_slot, even, 0)
            score(spec, refs, here._replace(step=even + 1), 1)
            is_last = even + 2 == spec.num_steps
            ahead = Place(
                jnp.where(is_last, next_place.q_slot, here.q_slot),
                jnp.where(is_last, next_place.kv_slot, here.kv_slot),
                jnp.where(is_last, next_place.step, even + 2),
            )
            weigh(spec, refs, item, even + 1, 1, masked=masked)
            add_values(spec, refs, here.kv_slot, even + 1, 1)
            score(spec, refs, ahead, 0)
            return carry

        jax.lax.fori_loop(0, spec.num_steps // 2, pair_of_steps, None)

    jax.lax.cond(is_masked(spec, item), lambda: steps(True), lambda: steps(False))


def reset_state(refs: ExtendRefs) -> None:
    """Rows that have seen nothing."""
    for side in range(2):
        refs.maxima[side][...] = jnp.full_like(refs.maxima[side], LOWEST)
        refs.sums[side][...] = jnp.zeros_like(refs.sums[side])
        refs.values[side][...] = jnp.zeros_like(refs.values[side])


def finish_rows(spec: ExtendSpec, refs: ExtendRefs, pair: Scalar, side: int) -> None:
    """Results of the rows of a step, and their state as at the start."""
    head, first = head_and_row(spec, pair * 2 + side)
    scale = refs.v_scales[head]
    for begin in range(0, spec.chunk_rows, ROWS):
        num = min(ROWS, spec.chunk_rows - begin)
        rows = pl.ds(begin, num)
        target = pl.ds(pl.multiple_of(first + begin, SUBLANES), num)
        total = jnp.sum(refs.sums[side][pair, rows, :], axis=1, keepdims=True)
        mean = refs.values[side][pair, rows, :] * (scale / total)
        refs.results[head, target, :] = mean.astype(spec.out_dtype)
        if spec.return_lse:
            log_sum = refs.maxima[side][pair, rows, :] * LN_2 + jnp.log(total)
            refs.log_sums[head, target, :] = log_sum
        refs.maxima[side][pair, rows, :] = jnp.full((num, LANES), LOWEST, jnp.float32)
        refs.sums[side][pair, rows, :] = jnp.zeros((num, LANES), jnp.float32)
        refs.values[side][pair, rows, :] = jnp.zeros((num, spec.layout.out_width), jnp.float32)


def query_copy(spec: ExtendSpec, refs: ExtendRefs, tile: Scalar) -> Any:
    """The copy of a q tile."""
    slot = jax.lax.bitwise_and(tile, 1)
    row = pl.multiple_of(refs.slots[tile] * spec.group_size, 16)
    source = refs.queries.at[:, pl.ds(row, spec.head_rows), :]
    return pltpu.make_async_copy(source, refs.q.at[slot], refs.q_semaphores.at[slot])


def result_copies(spec: ExtendSpec, refs: ExtendRefs, tile: Scalar) -> list[Any]:
    """The copies of a q tile's results."""
    row = pl.multiple_of(refs.slots[tile] * spec.group_size, 16)
    rows = pl.ds(row, spec.head_rows)
    copies = [pltpu.make_async_copy(refs.results, refs.out.at[:, rows, :], refs.done.at[0])]
    if refs.lse is not None:
        copies.append(pltpu.make_async_copy(refs.log_sums, refs.lse.at[:, rows, :], refs.done.at[1]))
    return copies


def next_buffer(slot: Scalar) -> Scalar:
    """The buffer of the next item."""
    return jnp.where(slot == NUM_BUFFERS - 1, 0, slot + 1)
