"""How heads and lanes are arranged for the TPU kernels.

A TPU reads VMEM in groups of 128 lanes. The K of a kv head is read as the window of whole lane groups around its lanes,
so is its V; q lies in the same lanes as the K in the window and is 0 in the others, so that what else is in the window
adds nothing to a score. A head of 64 lanes has one window for both, [K | V]: no byte is read twice.

    head_dim 128, head 0: K in [0, 128), V in [128, 256)        head_dim 64, head 0: both in [0, 128)
    head_dim 96, head 1: K in [192, 288) of window [128, 384), V in [288, 384) of window [256, 384)

The query heads of one or more kv heads, a slab, share the sublanes of a tile: kv head by kv head is multiplied with all
rows of the slab and keeps its own, so that groups of few query heads leave no part of a vector register idle.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float

LANES = 128
SUBLANES = 8


@dataclass(frozen=True)
class Window:
    """Lanes [start, start + width) of a token, whole groups, in which a head's lanes begin at `offset`."""

    start: int
    width: int
    offset: int

    @property
    def lanes(self) -> slice:
        """Of a token."""
        return slice(self.start, self.start + self.width)


@dataclass(frozen=True)
class Slab:
    """KV heads [first_head, first_head + num_heads), whose query heads are rows [row, row + num_rows), padded."""

    first_head: int
    num_heads: int
    row: int
    num_rows: int

    @property
    def heads(self) -> range:
        """Its kv heads."""
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def rows(self) -> slice:
        """Of all rows."""
        return slice(self.row, self.row + self.num_rows)


@dataclass(frozen=True)
class HeadLayout:
    """Windows and slabs of a shape. width: W, whole lane groups."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int

    @property
    def group_size(self) -> int:
        """Query heads that read one kv head."""
        return self.num_heads // self.num_kv_heads

    def k_window(self, head: int) -> Window:
        """Where the K of a kv head is read."""
        return self._window(2 * head * self.head_dim)

    def v_window(self, head: int) -> Window:
        """Where the V of a kv head is read."""
        return self._window((2 * head + 1) * self.head_dim)

    def _window(self, lane: int) -> Window:
        start = lane // LANES * LANES
        return Window(start, _round_up(lane + self.head_dim, LANES) - start, lane - start)

    @functools.cached_property
    def q_width(self) -> int:
        """Lanes of a row of q: of the widest K window."""
        return max(self.k_window(head).width for head in range(self.num_kv_heads))

    @functools.cached_property
    def out_width(self) -> int:
        """Lanes of a row of the result: of the widest V window."""
        return max(self.v_window(head).width for head in range(self.num_kv_heads))

    @functools.cached_property
    def slabs(self) -> tuple[Slab, ...]:
        """As many kv heads in one as fit in 8 sublanes, at least one."""
        per_slab = max(1, SUBLANES // self.group_size)
        num_rows = _round_up(min(per_slab, self.num_kv_heads) * self.group_size, SUBLANES)
        firsts = range(0, self.num_kv_heads, per_slab)
        return tuple(
            Slab(first, min(per_slab, self.num_kv_heads - first), index * num_rows, num_rows)
            for index, first in enumerate(firsts)
        )

    @property
    def num_rows(self) -> int:
        """Of all slabs."""
        return len(self.slabs) * self.slabs[0].num_rows

    @property
    def spare_from(self) -> int:
        """The first lane of a token that belongs to no head and may hold anything."""
        return 2 * self.num_kv_heads * self.head_dim

    def stack(self, heads: Float[jax.Array, "T N H"]) -> Float[jax.Array, "T M D"]:
        """Query heads as rows of slabs, each in the lanes of its K window; 0 elsewhere."""
        windows = [self.k_window(head) for head in range(self.num_kv_heads)]
        grouped = heads.reshape(heads.shape[0], self.num_kv_heads, -1, self.head_dim)
        offsets = [window.offset for window in windows]
        if any(offsets) or self.q_width != self.head_dim:
            parts = [
                jnp.pad(grouped[:, head], ((0, 0), (0, 0), (offset, self.q_width - offset - self.head_dim)))
                for head, offset in enumerate(offsets)
            ]
            grouped = jnp.stack(parts, axis=1)
        return self._to_slabs(grouped)

    def _to_slabs(self, grouped: Float[jax.Array, "T G X D"]) -> Float[jax.Array, "T M D"]:
        num_tokens, _, group_size, lanes = grouped.shape
        per_slab, num_rows = self.slabs[0].num_heads, self.slabs[0].num_rows
        missing = len(self.slabs) * per_slab - self.num_kv_heads
        grouped = _pad_axis(grouped, 1, missing)
        slabs = grouped.reshape(num_tokens, len(self.slabs), per_slab * group_size, lanes)
        slabs = _pad_axis(slabs, 2, num_rows - per_slab * group_size)
        return slabs.reshape(num_tokens, self.num_rows, lanes)

    def unstack(self, rows: Float[jax.Array, "T M D"]) -> Float[jax.Array, "T N H"]:
        """The query heads of rows of slabs, each from the lanes of its V window."""
        grouped = self.unstack_rows(rows)
        offsets = [self.v_window(head).offset for head in range(self.num_kv_heads)]
        if len(set(offsets)) == 1:
            grouped = grouped[..., offsets[0] : offsets[0] + self.head_dim]
        else:
            parts = [grouped[:, head, :, start : start + self.head_dim] for head, start in enumerate(offsets)]
            grouped = jnp.stack(parts, axis=1)
        return grouped.reshape(rows.shape[0], self.num_heads, self.head_dim)

    def unstack_rows(self, rows: Float[jax.Array, "T M D"]) -> Float[jax.Array, "T G X D"]:
        """Rows of slabs by kv head, without padding."""
        per_slab, num_rows = self.slabs[0].num_heads, self.slabs[0].num_rows
        slabs = rows.reshape(rows.shape[0], len(self.slabs), num_rows, rows.shape[2])
        slabs = slabs[:, :, : per_slab * self.group_size]
        heads = slabs.reshape(rows.shape[0], -1, self.group_size, rows.shape[2])
        return heads[:, : self.num_kv_heads]


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _pad_axis(x: jax.Array, axis: int, amount: int) -> jax.Array:
    if not amount:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, amount)
    return jnp.pad(x, widths)
