"""A pool with more elements than 32 bits count: no offset wraps around.

Without a GPU the kernels' own code is read, as Pallas gives it to Triton; `radix-jax check-kernel pallas_gpu` runs them
over such a pool where there is one.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from triton_code import lowered, triton_code

from radix_jax.functional import MAX_SLOTS, init_kv
from radix_jax.models.llama import LlamaConfig
from radix_jax.pallas_kernels import paged_attention, write_kv

PAGE_SIZE, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM, NUM_ROWS = 64, 8, 32, 128, 2
WIDTH = 2 * NUM_KV_HEADS * HEAD_DIM
LARGE, SMALL = 40_000, 100
Shape = jax.ShapeDtypeStruct


def attend(max_q_len: int) -> Callable[[int, Any], jax.stages.Lowered]:
    def lower(num_pages: int, dtype: Any) -> jax.stages.Lowered:
        def fn(*arrays: jax.Array) -> Any:
            return paged_attention(*arrays, page_offset=0, scale=0.1, max_q_len=max_q_len, backend="pallas_gpu")

        pool = Shape((num_pages, PAGE_SIZE, WIDTH), dtype)
        q = Shape((NUM_ROWS * max_q_len, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
        rows = [Shape(shape, jnp.int32) for shape in ((NUM_ROWS, 8), (NUM_ROWS,), (NUM_ROWS + 1,))]
        return lowered(fn, q, pool, *rows)

    return lower


def write(num_pages: int, dtype: Any) -> jax.stages.Lowered:
    def fn(*arrays: jax.Array) -> Any:
        return write_kv(*arrays, page_offset=0, backend="pallas_gpu")

    pool = Shape((num_pages, PAGE_SIZE, WIDTH), dtype)
    new = Shape((NUM_ROWS, NUM_KV_HEADS, HEAD_DIM), jnp.bfloat16)
    return lowered(fn, pool, new, new, Shape((NUM_ROWS,), jnp.int32))


def pool_offsets(code: str) -> Iterator[list[str]]:
    """For each access to the pool the instructions that make its offset, back to where 32 bits are widened.

    The pool is what tokens' K or V lie in: the only pointers of which a kernel makes tiles with a product by WIDTH.
    """
    defined: dict[str, str] = {}

    def makers(value: str) -> list[str]:
        made = defined.get(value, "")
        if made.startswith(("arith.extui", "arith.extsi")):
            return [made]
        operands = re.findall(r"%\w+", made.split(" : ")[0])
        return [made, *(maker for operand in operands for maker in makers(operand))]

    # In order: branches and loops use names again.
    for name, made in re.findall(r"(%\w+)(?::\d+)? = (.*)", code):
        defined[name] = made
        if made.startswith("tt.addptr") and "tensor<" in made:
            offset = makers(re.findall(r"%\w+", made)[1])
            if any(re.match(rf"arith.constant {WIDTH} : i(32|64)$", maker) for maker in offset):
                yield offset


KERNELS = {
    "decode_kernel": (attend(1), 2),
    "extend_kernel": (attend(3), 4),  # full blocks and masked ones, K and V of each
    "write_kernel": (write, 2),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_offsets_into_a_large_pool_have_64_bits(kernel: str, dtype: str) -> None:
    """Slots are 32-bit numbers, far below 2**31; times the width they are not, and the product is of 64 bits."""
    lower, num_accesses = KERNELS[kernel]
    assert LARGE * PAGE_SIZE * WIDTH > 2**32
    offsets = list(pool_offsets(triton_code(lower(LARGE, dtype))[kernel]))
    assert len(offsets) == num_accesses
    for offset in offsets:
        products = [maker for maker in offset if maker.startswith("arith.muli")]
        assert products
        assert all(product.endswith("i64>") for product in products)


@pytest.mark.parametrize("kernel", KERNELS)
def test_page_ids_and_slots_are_read_under_a_mask(kernel: str) -> None:
    """Tiles reach past the page table's end, and an interpreted kernel that reads there is not seen."""
    lower, _ = KERNELS[kernel]
    loads = re.findall(r"tt\.load (.*) : tensor<\d+x!tt\.ptr<i32>>", triton_code(lower(SMALL, "bfloat16"))[kernel])
    assert len(loads) >= 1
    assert all(len(load.split(", ")) == 3 for load in loads), "pointers, mask, what stands for the rest"


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_reading_of_the_code_tells_them_apart(kernel: str) -> None:
    """Over a small pool 32 bits do, and are seen."""
    lower, num_accesses = KERNELS[kernel]
    offsets = list(pool_offsets(triton_code(lower(SMALL, "bfloat16"))[kernel]))
    assert len(offsets) == num_accesses
    for offset in offsets:
        assert not any("i64" in maker for maker in offset)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_largest_pool_of_32_bits(kernel: str) -> None:
    """At 2**31 elements of 2 bytes the last offset is 2**31 - 1; one page more needs 64 bits."""
    lower, _ = KERNELS[kernel]
    most = 2**31 // (PAGE_SIZE * WIDTH)
    for num_pages, is_wide in ((most, False), (most + 1, True)):
        offsets = list(pool_offsets(triton_code(lower(num_pages, "bfloat16"))[kernel]))
        assert {any("i64" in maker for maker in offset) for offset in offsets} == {is_wide}


@pytest.mark.parametrize("kernel", KERNELS)
def test_pools_that_no_offset_suits_are_refused(kernel: str) -> None:
    """1-byte elements: from 2**31 to 2**32 of them would get signed 32-bit offsets."""
    lower, _ = KERNELS[kernel]
    with pytest.raises(ValueError, match="the GPU kernels address 1-byte elements up to 2147483648"):
        lower(2**31 // (PAGE_SIZE * WIDTH) + 1, "float8_e4m3fn")


def test_slots_stay_below_31_bits() -> None:
    """Padding slots lie past the pool and a layer's offset is added to them, in 32 bits still."""
    assert 2 * MAX_SLOTS <= 2**31
    tiny = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=8
    )
    with pytest.raises(ValueError, match=f"exceed {MAX_SLOTS} slots; lower num_pages"):
        init_kv(tiny, MAX_SLOTS // 2 + 1, 1)
