"""Write new keys and values into the page pool, and copy pages inside it."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int32

from radix_jax.arrays import KVPool


def write_kv(
    kv_pages: KVPool,
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    write_slots: Int32[jax.Array, " T"],
    *,
    page_offset: int,
) -> KVPool:
    """The pool with token t's K and V in slot write_slots[t] of the layer that starts at page `page_offset`.

    A slot is page * page_size + offset within one layer. Slots differ from each other and are not negative; padding
    slots are at least LP * page_size, so that no layer's offset brings them back inside, and are dropped. Updates in
    place when the pool is donated.
    """
    _, page_size, width = kv_pages.shape
    lanes = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1).astype(kv_pages.dtype)
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
