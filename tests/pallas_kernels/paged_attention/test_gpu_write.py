"""The GPU write kernel, interpreted on the CPU."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from radix_jax.pallas_kernels.paged_attention.gpu_write import write_kv_gpu

NUM_LAYERS, NUM_PAGES = 3, 4


def written(
    *,
    slots: list[int],
    page_size: int = 4,
    head_dim: int = 80,
    num_kv_heads: int = 2,
    width: int | None = None,
    dtype: Any = jnp.float32,
    pool_dtype: Any = None,
    kv_scales: np.ndarray | None = None,
    factor: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(pool before, pool after, k, v) of a write into the second layer."""
    rng = np.random.default_rng(0)
    width = width or 2 * num_kv_heads * head_dim
    shape = (NUM_LAYERS * NUM_PAGES, page_size, width)
    pool = jnp.asarray(rng.standard_normal(shape), pool_dtype or dtype)
    k, v = (jnp.asarray(factor * rng.standard_normal((len(slots), num_kv_heads, head_dim)), dtype) for _ in range(2))
    scales = None if kv_scales is None else jnp.asarray(kv_scales)
    out = write_kv_gpu(
        pool, k, v, jnp.asarray(slots, jnp.int32), page_offset=NUM_PAGES, kv_scales=scales, interpret=True
    )
    assert out.dtype == pool.dtype
    as_float = (np.asarray(x, np.float32) for x in (pool, out, k, v))
    return tuple(as_float)  # pyright: ignore[reportReturnType]


def expected(
    pool: np.ndarray, k: np.ndarray, v: np.ndarray, slots: list[int], kv_scales: np.ndarray | None = None
) -> np.ndarray:
    """The pool after plain assignments, token by token."""
    want = pool.copy()
    scales = np.ones((k.shape[1], 2), np.float32) if kv_scales is None else kv_scales
    for token, slot in enumerate(slots):
        if slot >= NUM_PAGES * pool.shape[1]:
            continue
        for head in range(k.shape[1]):
            lanes = np.concatenate([k[token, head] / scales[head, 0], v[token, head] / scales[head, 1]])
            start = head * len(lanes)
            want[NUM_PAGES + slot // pool.shape[1], slot % pool.shape[1], start : start + len(lanes)] = lanes
    return want


def padding(page_size: int, count: int) -> list[int]:
    first = NUM_LAYERS * NUM_PAGES * page_size
    return [first + i for i in range(count)]


@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 64), (4, 80), (16, 128)])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_write(page_size: int, head_dim: int, num_tokens: int) -> None:
    """The layer's first and last slots among them; padding is dropped, all else stays bit for bit."""
    last = NUM_PAGES * page_size - 1
    slots = [last, 0, 2][:num_tokens] + padding(page_size, 9)
    pool, out, k, v = written(slots=slots, page_size=page_size, head_dim=head_dim)
    np.testing.assert_array_equal(out, expected(pool, k, v, slots))


def test_a_wrong_slot_shows() -> None:
    slots = [5, 9, 3]
    pool, out, k, v = written(slots=slots)
    assert (out != expected(pool, k, v, [5, 9, 4])).any()


def test_the_pools_last_slot_survives_padding() -> None:
    """A negative or wrapped padding slot would hit it."""
    slots = padding(4, 16)
    pool, out, _, _ = written(slots=slots)
    np.testing.assert_array_equal(out, pool)


def test_lanes_past_the_heads_are_left_alone() -> None:
    slots = [3, 7]
    pool, out, k, v = written(slots=slots, width=384)
    np.testing.assert_array_equal(out, expected(pool, k, v, slots))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_values_are_cast_to_the_pool(dtype: Any) -> None:
    slots = [3, 7]
    pool, out, k, v = written(slots=slots, pool_dtype=dtype)
    want = expected(pool, k, v, slots)
    np.testing.assert_array_equal(out, np.asarray(jnp.asarray(want, dtype), np.float32))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_float8_is_scaled_and_cut_to_its_range(dtype: Any) -> None:
    slots, largest = [3, 7, 11], float(jnp.finfo(dtype).max)
    kv_scales = np.asarray([[0.5, 2.0], [1.0, 4.0]], np.float32)
    pool, out, k, v = written(slots=slots, pool_dtype=dtype, kv_scales=kv_scales, factor=largest)
    want = expected(pool, k, v, slots, kv_scales)
    assert (np.abs(want) > largest).any()
    want = np.clip(want, -largest, largest)
    np.testing.assert_array_equal(out, np.asarray(jnp.asarray(want, dtype), np.float32))
