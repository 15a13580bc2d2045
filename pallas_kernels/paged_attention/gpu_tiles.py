"""What the GPU attention kernels share: loading a tile of K and V through the page table, and one step of softmax.

Inside a Pallas Triton kernel array sizes are powers of two, so a head of 80 or 96 lanes is a tile of 128 whose lanes
past the head are masked off. Rows of a tile are (token, head of the group) pairs that read the same kv head.

The pool is seen as [slots, W], a free view on a GPU: token s of a row is slot
`(page_table[row, s // K] + page_offset) * K + s % K`, so that every page size is one code path.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Bool, Float, Float32, Int32

from radix_jax.pallas_kernels.paged_attention.gpu_blocks import power_of_two

# From jax 0.11 on each lowering of a Triton kernel says so, long after our call is over; nothing else is silenced.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

# A Ref while a kernel is traced: memory on the device, read and written by plgpu.load and plgpu.store.
Ref = Any
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# Above it small tanh(x) need their series: its registers are worth it for no cap that models have.
MAX_PLAIN_CAP = 100.0
# Below it three terms of the series of tanh(x) are right to float32: the next is 17/315 * x**6 of the result.
SMALL_TANH = 0.0625
# Stands for minus infinity: exp2(x - NEG) is 0 and NEG - NEG is 0, where infinities would give NaN.
NEG = -1e30


@dataclass(frozen=True)
class TileSpec:
    """What a kernel is compiled for.

    scale: of the scores. sliding_window: tokens that a query sees, itself included; None: all before it.
    logit_soft_cap: c of c * tanh(scores / c), or None. compute_dtype: what goes into the matmuls.
    """

    page_size: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    scale: float
    sliding_window: int | None
    logit_soft_cap: float | None
    compute_dtype: Any

    @property
    def group_size(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def lanes(self) -> int:
        """head_dim rounded up to what a tile can be."""
        return power_of_two(self.head_dim)


class KVHead(NamedTuple):
    """One kv head of one row's pages: refs, and scalars read once."""

    pool: Ref
    page_table: Ref
    page_offset: Int32[jax.Array, ""]
    row: Int32[jax.Array, ""]
    head: Int32[jax.Array, ""]
    kv_len: Int32[jax.Array, ""]


class Softmax(NamedTuple):
    """Online softmax over the blocks seen so far: maximum, sum and weighted values of each row, in base 2."""

    top: Float32[jax.Array, " M"]
    total: Float32[jax.Array, " M"]
    values: Float32[jax.Array, "M D"]


def empty_softmax(num_rows: int, lanes: int) -> Softmax:
    """The state before any block."""
    return Softmax(
        jnp.full((num_rows,), NEG, jnp.float32),
        jnp.zeros((num_rows,), jnp.float32),
        jnp.zeros((num_rows, lanes), jnp.float32),
    )


def finish_softmax(state: Softmax) -> tuple[Float32[jax.Array, "M D"], Float32[jax.Array, " M"]]:
    """(weighted mean, base-2 log of the sum) of each row; 0 and -inf where nothing was seen."""
    seen = state.total > 0.0
    total = jnp.where(seen, state.total, 1.0)
    return state.values / total[:, None], jnp.where(seen, state.top + jnp.log2(total), -jnp.inf)


def load_tile(ref: Ref, indices: tuple[Any, ...], mask: Bool[jax.Array, "M D"] | None) -> jax.Array:
    """ref[indices], 0 where masked off; what is masked off is not read."""
    if mask is None:
        return plgpu.load(ref.at[indices])
    return plgpu.load(ref.at[indices], mask=mask, other=0.0)


def head_mask(spec: TileSpec, rows: Bool[jax.Array, " M"] | None, num_rows: int) -> Bool[jax.Array, "M D"] | None:
    """Which elements of a tile are real: its `rows` (None: all) and the lanes of the head. None: all of them."""
    mask = None if rows is None else jnp.broadcast_to(rows[:, None], (num_rows, spec.lanes))
    if spec.lanes == spec.head_dim:
        return mask
    lanes = jnp.broadcast_to((jnp.arange(spec.lanes) < spec.head_dim)[None, :], (num_rows, spec.lanes))
    return lanes if mask is None else mask & lanes


def load_pages(spec: TileSpec, kv: KVHead, positions: Int32[jax.Array, " S"]) -> Int32[jax.Array, " S"]:
    """Page ids of `positions` of the row; 0 past its end, where the table may hold anything and is not read."""
    entries = kv.page_table.at[kv.row, positions // spec.page_size]
    return plgpu.load(entries, mask=positions < kv.kv_len, other=0)


def load_kv(
    spec: TileSpec,
    kv: KVHead,
    pages: Int32[jax.Array, " S"],
    positions: Int32[jax.Array, " S"],
    *,
    all_written: bool,
) -> tuple[Float[jax.Array, "S D"], Float[jax.Array, "S D"]]:
    """K and V at `positions` of the row, which lie in `pages`, in the compute dtype.

    all_written: all of them are before kv_len. Otherwise 0 stands for those past it, as their slots may hold NaN.
    """
    slots = (pages + kv.page_offset) * spec.page_size + positions % spec.page_size
    mask = head_mask(spec, None if all_written else positions < kv.kv_len, slots.shape[0])
    k_lanes = kv.head * (2 * spec.head_dim) + jnp.arange(spec.lanes)
    k = load_tile(kv.pool, (slots[:, None], k_lanes[None, :]), mask)
    v = load_tile(kv.pool, (slots[:, None], k_lanes[None, :] + spec.head_dim), mask)
    return k.astype(spec.compute_dtype), v.astype(spec.compute_dtype)


def dot(a: jax.Array, b: jax.Array, *, contract_b: int) -> Float32[jax.Array, "M X"]:
    """a's last axis against axis `contract_b` of b, summed in float32. Float32 inputs are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a, b, (((1,), (contract_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def attend_blocks(
    spec: TileSpec,
    q: Float[jax.Array, "M D"],
    kv: KVHead,
    k_scale: Float32[jax.Array, ""],
    blocks: tuple[Any, Any],
    block_len: int,
    state: Softmax,
    sees: Callable[[Int32[jax.Array, "1 S"]], Bool[jax.Array, "M S"]] | None,
) -> Softmax:
    """The state after blocks [begin, end) of the row (Milakov and Gimelshein 2018, algorithm 3).

    `sees` tells which rows of the tile see which positions; None: every row sees every one, and all are written.
    """
    begin, end = blocks

    def positions_of(block: Int32[jax.Array, ""]) -> Int32[jax.Array, " S"]:
        return block * block_len + jnp.arange(block_len)

    def step(block: Int32[jax.Array, ""], carry: tuple[Softmax, jax.Array]) -> tuple[Softmax, jax.Array]:
        state, pages = carry
        positions = positions_of(block)
        k, v = load_kv(spec, kv, pages, positions, all_written=sees is None)
        # A block ahead, so that no load of K and V waits for its page ids.
        next_pages = load_pages(spec, kv, positions_of(block + 1))
        scores = base_2_scores(spec, dot(q, k, contract_b=1), k_scale)
        if sees is not None:
            scores = jnp.where(sees(positions[None, :]), scores, NEG)
        return add_block(state, scores, v), next_pages

    return jax.lax.fori_loop(begin, end, step, (state, load_pages(spec, kv, positions_of(begin))))[0]


def add_block(state: Softmax, scores: Float32[jax.Array, "M S"], v: Float[jax.Array, "S D"]) -> Softmax:
    """The state with one more block of base-2 scores."""
    top = jnp.maximum(state.top, scores.max(axis=1))
    weights = jnp.exp2(scores - top[:, None])
    decay = jnp.exp2(state.top - top)
    values = state.values * decay[:, None] + dot(weights.astype(v.dtype), v, contract_b=0)
    return Softmax(top, state.total * decay + weights.sum(axis=1), values)


def base_2_scores(
    spec: TileSpec, products: Float32[jax.Array, "M S"], k_scale: Float32[jax.Array, ""]
) -> Float32[jax.Array, "M S"]:
    """Scaled and capped scores times log2(e), so that exp2 of them is exp of the scores."""
    if spec.logit_soft_cap is None:
        return products * (k_scale * (spec.scale * LOG2_E))
    cap = spec.logit_soft_cap
    x = products * (k_scale * (spec.scale / cap))
    # Right at both ends, where exp2 runs into inf or 0; a small x is rounded by what 1.0 is.
    tanh = 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2_E)) + 1.0)
    if cap > MAX_PLAIN_CAP:
        square = x * x
        series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
        tanh = jnp.where(jnp.abs(x) < SMALL_TANH, series, tanh)
    return tanh * (cap * LOG2_E)


def check_addressable(name: str, array: Any) -> None:
    """Raise ValueError where the kernels could not address all of an array.

    Pallas takes 64-bit offsets above 2**32 bytes, and signed 32-bit ones, counted in elements, below: too short for
    1-byte elements from 2**31 to 2**32 bytes.
    """
    num_bytes = math.prod(array.shape) * array.dtype.itemsize
    if 2**31 * array.dtype.itemsize < num_bytes <= 2**32:
        raise ValueError(
            f"{name} of {num_bytes} bytes in {array.dtype}: the GPU kernels address 1-byte elements up to {2**31} "
            f"bytes or from {2**32 + 1} bytes on, not between; take fewer or more pages"
        )
    if math.prod(array.shape[:-1]) >= 2**31:
        raise ValueError(f"{name} of shape {array.shape} has too many tokens: slots are 32-bit, below {2**31}")


def spec_of(
    q: jax.Array,
    kv_pages: jax.Array,
    *,
    num_kv_heads: int,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
) -> TileSpec:
    """What the kernels are compiled for, from the arrays. Matmuls run in q's dtype, or in float32 if that of the pool
    is a wider one; a float8 pool is widened to q's."""
    wider = q.dtype if kv_pages.dtype.itemsize == 1 else jnp.promote_types(q.dtype, kv_pages.dtype)
    return TileSpec(
        page_size=kv_pages.shape[1],
        head_dim=q.shape[2],
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        scale=float(scale),
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        compute_dtype=jnp.dtype(wider),
    )
