"""Writing keys and values into the pool: the right lanes of the right slots, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radix_jax.pallas_kernels.paged_attention import write_kv

NUM_LAYERS, NUM_PAGES, NUM_KV_HEADS, HEAD_DIM = 3, 7, 2, 16
WIDTH = 2 * NUM_KV_HEADS * HEAD_DIM


def numbered_pool(page_size: int, width: int = WIDTH) -> np.ndarray:
    """Each slot is filled with its own number, over all layers."""
    num_slots = NUM_LAYERS * NUM_PAGES * page_size
    pool = np.repeat(np.arange(num_slots, dtype=np.float32), width)
    return pool.reshape(NUM_LAYERS * NUM_PAGES, page_size, width)


def new_kv(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, num_tokens, NUM_KV_HEADS, HEAD_DIM)).astype(np.float32)
    return k, v


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_only_the_named_slots_of_the_layer_change(page_size: int, layer: int) -> None:
    slots_per_layer = NUM_PAGES * page_size
    real = np.random.default_rng(layer).permutation(np.arange(page_size, slots_per_layer - 1))[:4]
    real = np.append(real, slots_per_layer - 1)  # the last slot of a layer borders on the next one
    padding = NUM_LAYERS * slots_per_layer + np.arange(3)
    k, v = new_kv(8)
    expected = numbered_pool(page_size).reshape(-1, WIDTH)
    for token, slot in enumerate(real):
        for head in range(NUM_KV_HEADS):
            lanes = 2 * head * HEAD_DIM + np.arange(HEAD_DIM)
            expected[layer * slots_per_layer + slot, lanes] = k[token, head]
            expected[layer * slots_per_layer + slot, lanes + HEAD_DIM] = v[token, head]
    slots = jnp.asarray(np.append(real, padding), jnp.int32)
    pool = jnp.asarray(numbered_pool(page_size))
    written = write_kv(pool, jnp.asarray(k), jnp.asarray(v), slots, page_offset=layer * NUM_PAGES)
    np.testing.assert_array_equal(np.asarray(written).reshape(-1, WIDTH), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_rounded_to_the_pool(dtype: str) -> None:
    k, v = new_kv(1)
    pool = jnp.zeros((NUM_PAGES, 4, WIDTH), dtype)
    written = write_kv(pool, jnp.asarray(k), jnp.asarray(v), jnp.asarray([5], jnp.int32), page_offset=0)
    assert written.dtype == dtype
    expected = np.stack([k[0], v[0]], axis=1).reshape(-1)
    np.testing.assert_array_equal(written[1, 1], jnp.asarray(expected, dtype))


def test_lanes_that_only_pad_the_pool_are_left_zero() -> None:
    k, v = new_kv(1)
    pool = jnp.zeros((NUM_PAGES, 4, 128), jnp.float32)
    written = write_kv(pool, jnp.asarray(k), jnp.asarray(v), jnp.asarray([5], jnp.int32), page_offset=0)
    np.testing.assert_array_equal(written[1, 1, :WIDTH], np.stack([k[0], v[0]], axis=1).reshape(-1))
    assert not np.asarray(written[1, 1, WIDTH:]).any()


def test_a_donated_pool_is_updated_in_place() -> None:
    k, v = new_kv(2)
    pool = jnp.asarray(numbered_pool(4))
    write = jax.jit(write_kv, donate_argnums=0, static_argnames="page_offset")
    compiled = write.lower(pool, k, v, np.array([4, 5], np.int32), page_offset=0).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pool.nbytes
    address = pool.unsafe_buffer_pointer()
    written = write(pool, k, v, np.array([4, 5], np.int32), page_offset=0)
    assert pool.is_deleted()
    assert written.unsafe_buffer_pointer() == address
