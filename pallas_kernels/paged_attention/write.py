"""Write new keys and values into the page pool, and copy pages inside it."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool
from radix_jax.attention_backends import registered_backends
from radix_jax.pallas_kernels.paged_attention.backends import attention_backend


def write_kv(
    kv_pages: KVPool,
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    write_slots: Int32[jax.Array, " T"],
    *,
    page_offset: int | Int32[jax.Array, ""],
    kv_scales: Float32[jax.Array, "G 2"] | None = None,
    backend: str = "auto",
) -> KVPool:
    """The pool with token t's K and V in slot write_slots[t] of the layer that starts at page `page_offset`.

    A slot is page * page_size + offset within one layer. Slots differ from each other and are not negative; padding
    slots are at least LP * page_size, so that no layer's offset brings them back inside, and are dropped. Updates in
    place when the pool is donated.

    kv_scales: K and V of head g are stored divided by kv_scales[g, 0] and kv_scales[g, 1]; None: as they are. What a
    float8 pool can't hold becomes its largest value. backend: see `attention_backend`; a registered one writes as
    "auto" does.

    Raises:
        ValueError: more lanes than the pool has, or kv_scales of another shape.
    """
    num_kv_heads, head_dim, width = *k.shape[1:], kv_pages.shape[2]
    if 2 * num_kv_heads * head_dim > width:
        raise ValueError(f"K and V of {num_kv_heads} heads of {head_dim} take more than the pool's {width} lanes")
    if kv_scales is not None and kv_scales.shape != (num_kv_heads, 2):
        raise ValueError(f"kv_scales are {list(kv_scales.shape)}; they must be [{num_kv_heads}, 2]")
    name, _ = attention_backend("auto" if backend in registered_backends() else backend)
    if name != "xla":
        # Pallas is loaded where it is used: it takes a while.
        from radix_jax.pallas_kernels.paged_attention.gpu_write import write_kv_gpu

        return write_kv_gpu(
            kv_pages,
            k,
            v,
            write_slots,
            page_offset=page_offset,
            kv_scales=kv_scales,
            interpret=name == "pallas_interpret",
        )
    return _scatter_kv(kv_pages, k, v, write_slots, page_offset, kv_scales)


def _scatter_kv(
    kv_pages: KVPool,
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    write_slots: Int32[jax.Array, " T"],
    page_offset: int | Int32[jax.Array, ""],
    kv_scales: Float32[jax.Array, "G 2"] | None,
) -> KVPool:
    _, page_size, width = kv_pages.shape
    lanes = jnp.stack([k, v], axis=2)
    if kv_scales is not None:
        lanes = lanes.astype(jnp.float32) / kv_scales[:, :, None]
    if kv_pages.dtype.itemsize == 1:
        largest = float(jnp.finfo(kv_pages.dtype).max)
        lanes = jnp.clip(lanes.astype(jnp.float32), -largest, largest)
    lanes = lanes.reshape(k.shape[0], -1).astype(kv_pages.dtype)
    lanes = jnp.pad(lanes, ((0, 0), (0, width - lanes.shape[1])))
    pages = write_slots // page_size + page_offset
    return kv_pages.at[pages, write_slots % page_size].set(lanes, mode="drop", unique_indices=True)


def copy_pages(
    kv_pages: KVPool, sources: Int32[jax.Array, " C"], targets: Int32[jax.Array, " C"], *, num_layers: int
) -> KVPool:
    """The pool with page sources[c] copied to page targets[c] in every layer.

    All sources are read before any target is written. Targets differ from each other; those that are no page of a layer
    are padding and dropped. Updates in place when the pool is donated.
    """
    num_pages = kv_pages.shape[0] // num_layers
    layers = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    offsets = layers * num_pages
    # Padding lies past the pool, each at a place of its own; plus an offset it would be a page of the next layer.
    past = kv_pages.shape[0] + layers * targets.shape[0] + jnp.arange(targets.shape[0], dtype=jnp.int32)
    places = jnp.where(targets < num_pages, targets + offsets, past)
    copied = kv_pages.at[sources + offsets].get(mode="promise_in_bounds")
    return kv_pages.at[places].set(copied, mode="drop", unique_indices=True)
