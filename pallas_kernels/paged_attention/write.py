"""Write new keys and values into the page pool."""

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
