"""The tile chooser: every choice leaves VMEM to spare, on every chip and for every shape that is supported."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from radix_jax.aot.tpu_child import mesh_of
from radix_jax.aot.tpu_targets import tpu_target_of
from radix_jax.pallas_kernels.paged_attention.backends import UnsupportedOption
from radix_jax.pallas_kernels.paged_attention.tpu import attend_and_write_tpu
from radix_jax.pallas_kernels.paged_attention.tpu_decode import spec_of
from radix_jax.pallas_kernels.paged_attention.tpu_decode_spec import DecodeSpec
from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import (
    ASSUMED_CHIP,
    CHIPS,
    MIB,
    Tiles,
    TpuChip,
    check_pool,
    check_scalars,
    chip_of,
    choose_tiles,
    vmem_array_bytes,
    write_group,
)

# (query heads, kv heads, head_dim), shards of one kv head among them.
SHAPES = [
    (32, 8, 128),
    (64, 8, 128),
    (32, 32, 128),
    (4, 1, 128),
    (8, 8, 256),
    (16, 1, 256),
    (9, 3, 64),
    (32, 8, 64),
    (3, 1, 64),
    (32, 8, 96),
    (6, 2, 80),
    (64, 64, 64),
]
DTYPES = [("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "float8_e4m3fn"), ("float16", "bfloat16")]


def tiles_of(
    chip: TpuChip, heads: tuple[int, int, int], dtypes: tuple[str, str], page_size: int, *, context: int = 8192
) -> Tiles:
    """What the decode kernel takes, its results and the writing of new tokens included."""
    return spec_for(chip, heads, dtypes, page_size, context=context).tiles


def spec_for(
    chip: TpuChip, heads: tuple[int, int, int], dtypes: tuple[str, str], page_size: int, *, context: int
) -> DecodeSpec:
    num_heads, num_kv_heads, head_dim = heads
    width = -(-2 * num_kv_heads * head_dim // LANES) * LANES
    q = jax.ShapeDtypeStruct((8, num_heads, head_dim), jnp.dtype(dtypes[0]))
    pool = jax.ShapeDtypeStruct((4, page_size, width), jnp.dtype(dtypes[1]))
    return spec_of(
        q,
        pool,
        context // page_size,
        num_kv_heads=num_kv_heads,
        sliding_window=None,
        logit_soft_cap=None,
        return_lse=True,
        is_scaled=jnp.dtype(dtypes[1]).itemsize == 1,
        writes=True,
        chip=chip,
    )


@pytest.mark.parametrize("generation", CHIPS)
def test_every_choice_leaves_a_mebibyte(generation: str) -> None:
    chip = CHIPS[generation]
    for heads, dtypes, page_size in itertools.product(SHAPES, DTYPES, (32, 128, 1024)):
        tiles = tiles_of(chip, heads, dtypes, page_size)
        assert tiles.vmem_bytes + MIB <= tiles.vmem_limit_bytes <= 12 * MIB < chip.vmem_bytes, (heads, dtypes)
        assert tiles.num_buffers >= 2
        width = -(-2 * heads[1] * heads[2] // LANES) * LANES
        buffers = tiles.num_buffers * tiles.tile_len * width * jnp.dtype(dtypes[1]).itemsize
        assert buffers < tiles.vmem_bytes


def test_what_the_counts_are_for() -> None:
    """Llama 3 8B in bfloat16: 8 MiB at most on a v5e, and a fourth buffer where HBM is faster."""
    v5e = tiles_of(CHIPS["v5e"], (32, 8, 128), ("bfloat16", "bfloat16"), 128)
    assert (v5e.tile_len, v5e.num_buffers) == (512, 3)
    assert v5e.vmem_bytes <= 8 * MIB
    v6e = tiles_of(CHIPS["v6e"], (32, 8, 128), ("bfloat16", "bfloat16"), 128)
    assert (v6e.tile_len, v6e.num_buffers) == (512, 4)


def test_no_choice_takes_all() -> None:
    """Whatever a token takes: the tile shrinks, and at last there is none."""
    chip = TpuChip(4 * MIB, 3)
    for tile_bytes in range(128, 9000, 128):
        tiles = choose_tiles(chip, tile_bytes=tile_bytes, fixed_bytes=100_000, table_len=4096)
        assert tiles.vmem_bytes <= 3 * MIB
        assert tiles.vmem_bytes == tiles.num_buffers * tiles.tile_len * tile_bytes + 100_000
    with pytest.raises(UnsupportedOption, match=r"2 buffers of 128 tokens of 20000 bytes .* shard the kv heads"):
        choose_tiles(chip, tile_bytes=20_000, fixed_bytes=0, table_len=4096)


def test_no_tile_is_longer_than_a_row_can_be() -> None:
    lens = {
        table_len: choose_tiles(CHIPS["v5e"], tile_bytes=512, fixed_bytes=0, table_len=table_len).tile_len
        for table_len in (16, 128, 129, 256, 257, 2048)
    }
    assert lens == {16: 128, 128: 128, 129: 256, 256: 256, 257: 512, 2048: 512}


def test_bytes_in_vmem_are_whole_tiles() -> None:
    assert vmem_array_bytes((2, 3, 100), jnp.float32) == 2 * 8 * 128 * 4
    assert vmem_array_bytes((16, 256), jnp.bfloat16) == 16 * 256 * 2


@pytest.mark.parametrize(
    ("page_size", "width", "dtype", "message"),
    [
        (16, 320, "bfloat16", r"multiple of 128 lanes, and here it is 320; round it up"),
        (1, 256, "float32", r"at least 8 for float32, and here it is 1; set page_size=16"),
        (24, 256, "bfloat16", r"power of two .* here it is 24"),
        (16, 256, "float8_e4m3fn", r"at least 32 for float8_e4m3fn, and here it is 16"),
        (16, 256, "float16", r"takes no pool of float16.* use bfloat16"),
    ],
)
def test_pools_that_are_refused(page_size: int, width: int, dtype: str, message: str) -> None:
    with pytest.raises(UnsupportedOption, match=message):
        check_pool(page_size, width, jnp.dtype(dtype))


def test_pools_that_are_taken() -> None:
    for dtype in ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"):
        for page_size in (32, 64, 1024):
            check_pool(page_size, 384, jnp.dtype(dtype))
            assert page_size % write_group(dtype) == 0


def test_a_page_table_beyond_scalar_memory_is_refused() -> None:
    check_scalars(200_000, (100, 2000))
    with pytest.raises(UnsupportedOption, match=r"200001 words for a table of \[1000, 200\].* take larger pages"):
        check_scalars(200_001, (1000, 200))


def test_chips_by_the_name_of_their_device() -> None:
    names = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
    names |= {"TPU v6e": "v6e", "TPU7x": "v7x"}
    for kind, name in names.items():
        assert chip_of(kind) == CHIPS[name]
    assert chip_of("cpu") == chip_of() == ASSUMED_CHIP


@pytest.mark.parametrize("generation", CHIPS)
def test_on_a_cpu_tiles_are_chosen_for_the_chip_that_is_compiled_for(generation: str) -> None:
    target = tpu_target_of(generation)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            *(((4, heads, 128), jnp.bfloat16) for heads in (32, 8, 8)),
            ((9, 16, 2048), jnp.bfloat16),
            *((shape, jnp.int32) for shape in ((4, 128), (4,), (5,), (4,))),
        )
    ]
    step = functools.partial(attend_and_write_tpu, page_offset=0, scale=0.1, max_q_len=1)

    def memory(chip: TpuChip) -> tuple[str, str]:
        """The buffers of KV tiles, and the rows around new tokens."""
        spec = spec_for(chip, (32, 8, 128), ("bfloat16", "bfloat16"), 16, context=2048)
        return f"[{spec.tiles.num_buffers},{spec.tiles.tile_len},2048]", f"[2,{spec.new_rows},2048]"

    with jax.sharding.use_abstract_mesh(mesh_of(target.device_kind, target.cores_per_device)):
        there = str(jax.jit(step).trace(*arrays).jaxpr)
    here = str(jax.jit(step).trace(*arrays).jaxpr)
    assert memory(CHIPS[generation]) != memory(ASSUMED_CHIP)
    assert all(shape in there for shape in memory(CHIPS[generation]))
    assert all(shape in here for shape in memory(ASSUMED_CHIP))
