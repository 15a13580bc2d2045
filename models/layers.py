"""Layers that families share, as pure functions of their leaves. Matmuls accumulate in float32, and so do residuals."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int32

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling.

    kind "linear" divides every frequency by `factor`; "llama3" divides those whose wavelength is beyond
    original_len / low_freq_factor, keeps those within original_len / high_freq_factor, and blends between
    (Llama 3.1 model card).
    """

    theta: float = 10000.0
    kind: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_len: int = 8192


def parse_rope(hf_config: dict[str, Any]) -> RopeConfig:
    """The rope of a config.json, in any spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`, whose kind is
    under `rope_type` or `type`.

    Raises:
        ValueError: a kind that is not built, by name.
    """
    scaling = dict(hf_config.get("rope_scaling") or {}) | dict(hf_config.get("rope_parameters") or {})
    theta = float(scaling.get("rope_theta") or hf_config.get("rope_theta") or 10000.0)
    if (scaling.get("partial_rotary_factor") or hf_config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("config asks for partial_rotary_factor, which this model family does not have")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=float(_rope_field(scaling, kind, "factor")))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=float(_rope_field(scaling, kind, "factor")),
            low_freq_factor=float(_rope_field(scaling, kind, "low_freq_factor")),
            high_freq_factor=float(_rope_field(scaling, kind, "high_freq_factor")),
            original_len=int(_rope_field(scaling, kind, "original_max_position_embeddings")),
        )
    raise ValueError(f"config asks for rope scaling {kind!r}; built are default, linear and llama3")


def _rope_field(scaling: dict[str, Any], kind: str, name: str) -> float | int:
    if scaling.get(name) is None:
        raise ValueError(f"config's rope scaling {kind!r} lacks {name!r}")
    return scaling[name]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float32[np.ndarray, " half_H"]:
    """Angle a position of each of the head_dim / 2 pairs, in radians."""
    pairs = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.float32(rope.theta) ** pairs).astype(np.float32)
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        span = rope.high_freq_factor - rope.low_freq_factor
        kept = np.clip((rope.original_len / wavelengths - rope.low_freq_factor) / span, 0.0, 1.0)
        return (frequencies * (kept + (1 - kept) / rope.factor)).astype(np.float32)
    return frequencies


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int32[jax.Array, " T"]
) -> tuple[Float32[jax.Array, "T half_H"], Float32[jax.Array, "T half_H"]]:
    """Cosine and sine of each position's angles."""
    angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(rope, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[jax.Array, "T N H"], cos: Float32[jax.Array, "T half_H"], sin: Float32[jax.Array, "T half_H"]
) -> Float[jax.Array, "T N H"]:
    """Rotate pairs (i, i + H/2) of each head."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_norm(x: Float[jax.Array, "T D"], weight: Float[jax.Array, " D"], eps: float) -> Float32[jax.Array, "T D"]:
    """Root mean square norm (Zhang and Sennrich 2019), in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)


def linear(x: Float[jax.Array, "T D"], kernel: Float[jax.Array, "D F"]) -> Float32[jax.Array, "T F"]:
    """x @ kernel with the kernel's dtype for both operands and a float32 result."""
    return jnp.dot(x.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32)


def swiglu(
    x: Float[jax.Array, "T D"],
    gate: Float[jax.Array, "D F"],
    up: Float[jax.Array, "D F"],
    down: Float[jax.Array, "F D"],
) -> Float32[jax.Array, "T D"]:
    """Gated feed-forward (Shazeer 2020, SwiGLU)."""
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def dense_causal_attention(
    q: Float[jax.Array, "T N H"], k: Float[jax.Array, "T G H"], v: Float[jax.Array, "T G H"]
) -> Float32[jax.Array, "T N H"]:
    """Causal attention of one sequence over itself, in float32 and without a cache."""
    num_tokens, num_heads, head_dim = q.shape
    grouped = q.astype(jnp.float32).reshape(num_tokens, k.shape[1], -1, head_dim)
    scores = jnp.einsum("tgrh,sgh->grts", grouped, k.astype(jnp.float32)) * head_dim**-0.5
    causal = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("grts,sgh->tgrh", weights, v.astype(jnp.float32)).reshape(num_tokens, num_heads, head_dim)
