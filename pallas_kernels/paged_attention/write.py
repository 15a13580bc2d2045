"""Write new keys and values into the page pool, copy pages inside it, and carry pages out of it and into it."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool
from radix_jax.attention_backends import AttentionFn
from radix_jax.pallas_kernels.paged_attention.backends import (
    TPU_BACKENDS,
    attention_backend,
    attention_fn,
    tpu_interpretation,
)
from radix_jax.pallas_kernels.paged_attention.checks import check_write
from radix_jax.pallas_kernels.paged_attention.pool_lanes import pool_lanes


def write_kv(
    kv_pages: KVPool,
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    write_slots: Int32[jax.Array, " T"],
    *,
    page_offset: int | Int32[jax.Array, ""],
    kv_scales: Float32[jax.Array, "G 2"] | None = None,
    backend: str | AttentionFn = "auto",
) -> KVPool:
    """The pool with token t's K and V in slot write_slots[t] of the layer that starts at page `page_offset`.

    A slot is page * page_size + offset within one layer. Slots differ from each other and are not negative; padding
    slots are at least LP * page_size, so that no layer's offset brings them back inside, and are dropped. Updates in
    place when the pool is donated. Lanes from 2GH on are padding, and undefined in the tokens written.

    kv_scales: K of head g is stored divided by [g, 0], V by [g, 1]; None: as it is. In a float8 pool what is past its
    range becomes its largest value. backend: as of `paged_attention`; those without a kernel of ours scatter by XLA.

    Raises:
        ValueError: arrays that don't fit each other or have no element, an unknown backend.
        TypeError: a dtype that the kernels don't take.
        NotImplementedError: a backend that is not built yet.
    """
    check_write(kv_pages, k, v, write_slots, page_offset=page_offset, kv_scales=kv_scales)
    if not isinstance(backend, str):
        backend = "xla"
    elif backend == "auto":
        backend, _ = attention_backend()
    if backend in ("pallas_gpu", "pallas_interpret"):
        # Pallas is imported where it is used, and takes a while.
        from radix_jax.pallas_kernels.paged_attention.gpu_write import write_kv_gpu

        return write_kv_gpu(
            kv_pages,
            k,
            v,
            write_slots,
            page_offset=page_offset,
            kv_scales=kv_scales,
            interpret=backend == "pallas_interpret",
        )
    if backend in TPU_BACKENDS:
        from radix_jax.pallas_kernels.paged_attention.tpu_write import write_kv_tpu

        return write_kv_tpu(
            kv_pages,
            k,
            v,
            write_slots,
            page_offset=page_offset,
            kv_scales=kv_scales,
            interpret=tpu_interpretation(backend),
        )
    attention_fn(backend)  # refuses unknown names
    _, page_size, width = kv_pages.shape
    lanes = pool_lanes(k, v, width, kv_pages.dtype, kv_scales)
    pages = write_slots // page_size + page_offset
    return kv_pages.at[pages, write_slots % page_size].set(lanes, mode="drop", unique_indices=True)


def copy_pages(
    kv_pages: KVPool, sources: Int32[jax.Array, " C"], targets: Int32[jax.Array, " C"], *, num_layers: int
) -> KVPool:
    """The pool with page sources[c] copied to page targets[c] in every layer.

    All sources are read before any target is written. Targets differ from each other; those that are no page of a layer
    are padding and dropped. Updates in place when the pool is donated.
    """
    copied = kv_pages.at[_rows(kv_pages, sources, num_layers)].get(mode="promise_in_bounds")
    return kv_pages.at[_rows(kv_pages, targets, num_layers)].set(copied, mode="drop", unique_indices=True)


def read_pages(kv_pages: KVPool, pages: Int32[jax.Array, " C"], *, num_layers: int) -> Float[jax.Array, "C L K W"]:
    """What pages hold, of every layer."""
    return kv_pages.at[_rows(kv_pages, pages, num_layers).T].get(mode="promise_in_bounds")


def write_pages(
    kv_pages: KVPool, pages: Int32[jax.Array, " C"], values: Float[jax.Array, "C L K W"], *, num_layers: int
) -> KVPool:
    """The pool with pages of every layer set to values[c]. Pages as the targets of `copy_pages`, padding too. Updates
    in place when the pool is donated."""
    return kv_pages.at[_rows(kv_pages, pages, num_layers).T].set(values, mode="drop", unique_indices=True)


def _rows(kv_pages: KVPool, pages: Int32[jax.Array, " C"], num_layers: int) -> Int32[jax.Array, "L C"]:
    """Where these pages of each layer lie in the pool. Padding lies past its end, each at a place of its own; plus an
    offset it would be a page of the next layer."""
    num_pages = kv_pages.shape[0] // num_layers
    layers = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    past = kv_pages.shape[0] + layers * pages.shape[0] + jnp.arange(pages.shape[0], dtype=jnp.int32)
    return jnp.where(pages < num_pages, pages + layers * num_pages, past)
