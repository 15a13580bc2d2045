"""Tokens as the lanes of the pool."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32


def pool_lanes(
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    width: int,
    dtype: jnp.dtype,
    kv_scales: Float32[jax.Array, "G 2"] | None,
) -> Float[jax.Array, "T W"]:
    """Tokens as the pool holds them: K and V head by head, divided by their scales, then 0 up to `width`.

    For float8, whose casts make infinity or NaN of what is too large, cut to its range first.
    """
    lanes = jnp.stack([k, v], axis=2)
    if kv_scales is not None:
        lanes = lanes.astype(jnp.float32) / kv_scales[None, :, :, None]
    lanes = lanes.reshape(k.shape[0], -1)
    if dtype.itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        lanes = jnp.clip(lanes.astype(jnp.float32), -largest, largest)
    return jnp.pad(lanes.astype(dtype), ((0, 0), (0, width - lanes.shape[1])))
