"""A pool with more elements than 32 bits count: the TPU's kernels name pages of it, never elements.

What a compiler makes of a page's number is its own: addresses on a TPU count in wider units than elements. The kernels'
own arithmetic is read, as they give it to Pallas.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from radix_jax.pallas_kernels import paged_attention, write_kv

PAGE_SIZE, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM, NUM_ROWS, NUM_PAGES = 64, 8, 32, 128, 2, 40_000
WIDTH = 2 * NUM_KV_HEADS * HEAD_DIM
POOL = jax.ShapeDtypeStruct((NUM_PAGES, PAGE_SIZE, WIDTH), jnp.bfloat16)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def attend(max_q_len: int) -> Jaxpr:
    def fn(*arrays: jax.Array) -> Any:
        return paged_attention(*arrays, page_offset=0, scale=0.1, max_q_len=max_q_len, backend="pallas_tpu_interpret")

    q = jax.ShapeDtypeStruct((NUM_ROWS * max_q_len, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    return jax.make_jaxpr(fn)(q, POOL, ints(NUM_ROWS, 8), ints(NUM_ROWS), ints(NUM_ROWS + 1)).jaxpr


def write() -> Jaxpr:
    def fn(*arrays: jax.Array) -> Any:
        return write_kv(*arrays, page_offset=0, backend="pallas_tpu_interpret")

    new = jax.ShapeDtypeStruct((NUM_ROWS, NUM_KV_HEADS, HEAD_DIM), jnp.bfloat16)
    return jax.make_jaxpr(fn)(POOL, new, new, ints(NUM_ROWS)).jaxpr


def inner(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
        if hasattr(value, "eqns"):
            yield getattr(value, "jaxpr", value)


def eqns(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for one in inner(eqn):
            yield from eqns(one)


KERNELS: dict[str, Callable[[], Jaxpr]] = {
    "decode": lambda: attend(1),
    "extend": lambda: attend(3),
    "write": write,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_pool_is_addressed_by_pages(kernel: str) -> None:
    assert NUM_PAGES * PAGE_SIZE * WIDTH > 2**32
    kernels = [one for eqn in eqns(KERNELS[kernel]()) if eqn.primitive.name == "pallas_call" for one in inner(eqn)]
    inside = [eqn for one in kernels for eqn in eqns(one)]
    touching = [eqn for eqn in inside if any(getattr(var.aval, "shape", ()) == POOL.shape for var in eqn.invars)]
    copies = [eqn for eqn in touching if eqn.primitive.name == "dma_start"]
    assert copies
    # All others hand the pool on into a branch, a loop or a call.
    assert all(any(True for _ in inner(eqn)) for eqn in touching if eqn not in copies)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_product_by_the_width(kernel: str) -> None:
    """Pages times what a page has would leave 31 bits; pages, slots and items of work do not."""
    products = [eqn for eqn in eqns(KERNELS[kernel]()) if eqn.primitive.name in ("mul", "shift_left")]
    # Unsigned ones are halves of packed words.
    whole = [eqn for eqn in products if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.signedinteger)]
    assert whole
    for eqn in whole:
        factors = [int(var.val) for var in eqn.invars if isinstance(var, Literal)]
        assert all(factor < WIDTH for factor in factors), eqn
