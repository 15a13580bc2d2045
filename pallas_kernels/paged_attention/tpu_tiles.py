"""Sizes of the TPU kernels' tiles: chosen for a shape and a chip, with VMEM to spare."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from radix_jax.pallas_kernels.paged_attention.backends import UnsupportedOption
from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES, SUBLANES, HeadLayout

MIB = 1 << 20
# Left free beside what a kernel asks for, so that no choice fails by what the compiler adds of its own.
VMEM_MARGIN_BYTES = MIB
# At most this much is asked for, whatever the chip has: XLA keeps weights that it fetches ahead in the rest.
VMEM_BUDGET_BYTES = 12 * MIB
# int32 words of scalar memory that a compiled kernel was given; 262,144 are too many.
SMEM_WORDS = 200_000
TILE_LENS = (512, 256, 128)
MIN_BUFFERS = 2


@dataclass(frozen=True)
class TpuChip:
    """What the kernels need to know of a chip.

    vmem_bytes: of a core. num_buffers: KV tiles that keep its HBM busy. mxu_size: rows and columns of a matmul unit.
    has_tall_tiles: whether 16-bit arrays lie in VMEM in tiles of 16 rows, which are read whole, instead of 8.
    """

    vmem_bytes: int
    num_buffers: int
    mxu_size: int = 128
    has_tall_tiles: bool = False


CHIPS = {
    "v4": TpuChip(16 * MIB, 3),
    "v5e": TpuChip(128 * MIB, 3),
    "v5p": TpuChip(64 * MIB, 3),
    "v6e": TpuChip(128 * MIB, 4, 256),
    "v7x": TpuChip(64 * MIB, 4, 256, has_tall_tiles=True),
}
# Of programs that are made where no TPU is, and of chips that are not listed: what runs on all.
ASSUMED_CHIP = TpuChip(16 * MIB, 3, has_tall_tiles=True)
_KINDS = {"v4": "v4", "v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v5p": "v5p", "v6 lite": "v6e", "v6e": "v6e"}


@dataclass(frozen=True)
class Tiles:
    """tile_len: KV tokens of a tile. num_buffers: tiles in VMEM at a time. vmem_bytes: of the kernel, by estimate."""

    tile_len: int
    num_buffers: int
    vmem_bytes: int

    @property
    def vmem_limit_bytes(self) -> int:
        """What the compiler is allowed."""
        return self.vmem_bytes + VMEM_MARGIN_BYTES


def chip_of(device_kind: str | None = None) -> TpuChip:
    """The chip of a jax.Device.device_kind; None: of the device that is lowered for, where the mesh tells, as it does
    in compiles without a TPU; else of this process's first device."""
    if device_kind is None:
        told = jax.sharding.get_abstract_mesh().abstract_device
        device_kind = jax.local_devices()[0].device_kind if told is None else told.device_kind
    name = device_kind.removeprefix("TPU").strip().lower()
    return CHIPS.get("v7x" if name in ("7", "7x", "v7x") else _KINDS.get(name, ""), ASSUMED_CHIP)


def vmem_array_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """What an array takes in VMEM: the last two axes are whole tiles."""
    itemsize = jnp.dtype(dtype).itemsize
    *outer, rows, lanes = (1, *shape)
    size = -(-rows // SUBLANES) * SUBLANES * -(-lanes // LANES) * LANES * itemsize
    for extent in outer:
        size *= extent
    return size


def choose_tiles(
    chip: TpuChip, *, tile_bytes: int, fixed_bytes: int, table_len: int, tile_lens: Iterable[int] = TILE_LENS
) -> Tiles:
    """The longest tile, then the most buffers, that fit.

    tile_bytes: of one token in one buffer. fixed_bytes: whatever the tile. table_len: tokens that a row can have; no
    tile is longer than need be.

    Raises:
        UnsupportedOption: not even the smallest fits.
    """
    budget = min(chip.vmem_bytes, VMEM_BUDGET_BYTES) - VMEM_MARGIN_BYTES
    smallest = None
    for tile_len in tile_lens:
        smallest = tile_len
        if tile_len > LANES and tile_len >= 2 * table_len:
            continue
        for num_buffers in range(chip.num_buffers, MIN_BUFFERS - 1, -1):
            vmem_bytes = num_buffers * tile_len * tile_bytes + fixed_bytes
            # Two buffers of a long tile wait for each other; three of half the length don't.
            if vmem_bytes <= budget and (num_buffers > MIN_BUFFERS or tile_len == LANES):
                return Tiles(tile_len, num_buffers, vmem_bytes)
    raise UnsupportedOption(
        f"attention backend 'pallas_tpu': {MIN_BUFFERS} buffers of {smallest} tokens of {tile_bytes} bytes and "
        f"{fixed_bytes} bytes of state exceed the {budget} bytes of VMEM a kernel may take; shard the kv heads over "
        "more chips, or use xla"
    )


def check_pool(page_size: int, width: int, dtype: Any) -> None:
    """Nothing, if the TPU kernels can copy pages of this shape.

    Raises:
        UnsupportedOption: float16, lanes that are no whole groups, or pages that are no power of two of tile rows.
    """
    if jnp.dtype(dtype) == jnp.float16:
        raise UnsupportedOption(
            "attention backend 'pallas_tpu' takes no pool of float16, which TPU kernels can't load; use bfloat16, "
            "float32 or float8"
        )
    least = write_group(dtype)
    if width % LANES:
        raise UnsupportedOption(
            f"attention backend 'pallas_tpu' needs a pool whose width is a multiple of {LANES} lanes, and here it is "
            f"{width}; round it up (and give num_kv_heads), or use xla"
        )
    if page_size < least or page_size & (page_size - 1):
        raise UnsupportedOption(
            f"attention backend 'pallas_tpu' needs a page_size that is a power of two and at least {least} for "
            f"{jnp.dtype(dtype).name}, and here it is {page_size}; set page_size=16 or more (float8: 32), or use xla"
        )


def check_scalars(num_words: int, table_shape: tuple[int, ...]) -> None:
    """Nothing, if page table and work list fit into scalar memory.

    Raises:
        UnsupportedOption: they don't.
    """
    if num_words > SMEM_WORDS:
        raise UnsupportedOption(
            f"attention backend 'pallas_tpu' keeps page table and work list in scalar memory: {num_words} words for a "
            f"table of {list(table_shape)}, and {SMEM_WORDS} fit; take larger pages, fewer rows or a shorter context"
        )


def write_group(dtype: Any) -> int:
    """Rows of a page that are written at a time: those of one tile in HBM."""
    return 32 if jnp.dtype(dtype).itemsize == 1 else SUBLANES


def state_bytes(layout: HeadLayout) -> int:
    """Of the running maximum, sum and values of all rows."""
    per_lane = 2 * vmem_array_bytes((layout.num_rows, LANES), jnp.float32)
    return per_lane + vmem_array_bytes((layout.num_rows, layout.out_width), jnp.float32)
