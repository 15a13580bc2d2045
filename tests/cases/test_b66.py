"""A tile that asks for all of VMEM misses by what the compiler itself needs: every choice leaves a mebibyte."""

import jax
import jax.numpy as jnp
import pytest

from radix_jax.pallas_kernels.paged_attention.tpu_decode import spec_of
from radix_jax.pallas_kernels.paged_attention.tpu_extend_work import choose_extend_tiles
from radix_jax.pallas_kernels.paged_attention.tpu_heads import HeadLayout
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import CHIPS, MIB

# Tokens of 512 bytes to 32 KiB: the tile that just fits is another one for each.
KV_HEADS = [(num_kv_heads, head_dim) for num_kv_heads in (1, 2, 3, 8, 16, 32) for head_dim in (64, 128, 256)]


@pytest.mark.parametrize("generation", CHIPS)
@pytest.mark.parametrize("context_len", [128, 4096, 131072])
def test_no_tile_takes_all(generation: str, context_len: int) -> None:
    chip = CHIPS[generation]
    for num_kv_heads, head_dim in KV_HEADS:
        num_heads, width = 4 * num_kv_heads, 2 * num_kv_heads * head_dim
        q = jax.ShapeDtypeStruct((64, num_heads, head_dim), jnp.bfloat16)
        pool = jax.ShapeDtypeStruct((4, 64, width), jnp.bfloat16)
        options = {"num_kv_heads": num_kv_heads, "sliding_window": None, "logit_soft_cap": None, "chip": chip}
        decode = spec_of(q, pool, context_len // 64, return_lse=True, is_scaled=False, writes=True, **options).tiles
        extend = choose_extend_tiles(
            chip,
            HeadLayout(num_heads, num_kv_heads, head_dim, width),
            pool_dtype=jnp.dtype("bfloat16"),
            compute_dtype=jnp.dtype("bfloat16"),
            out_dtype=jnp.dtype("bfloat16"),
            return_lse=True,
            max_q_len=2048,
            table_len=context_len,
        )
        for tiles in (decode, extend):
            assert 0 < tiles.vmem_bytes <= chip.vmem_bytes - MIB, (num_kv_heads, head_dim)
