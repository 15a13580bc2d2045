"""What a call of the kernels is refused for, told while it is traced: shapes, dtypes and settings are static."""

import math
import numbers
from typing import Any

import jax.numpy as jnp

# Of scale and soft cap: their products with scores stay well within float32.
MAX_NUMBER = 1e30
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
POOL_DTYPES = (*FLOAT_DTYPES, "float8_e4m3fn", "float8_e5m2")


def check_attention(
    q: Any,
    kv_pages: Any,
    page_table: Any,
    kv_lens: Any,
    cu_q_lens: Any,
    *,
    page_offset: Any,
    scale: Any,
    sliding_window: Any,
    logit_soft_cap: Any,
    num_kv_heads: Any,
    kv_scales: Any,
    max_q_len: Any,
) -> tuple[int, int]:
    """(num_kv_heads, max_q_len) of a call of `paged_attention`, what was left out filled in.

    Raises:
        ValueError: arrays that don't fit each other, or a setting out of its range.
        TypeError: a dtype or a kind of setting that the kernels don't take.
    """
    _check_pool(kv_pages)
    _check_array("q", q, "[T, N, H]", FLOAT_DTYPES)
    _check_array("page_table", page_table, "[B, P]", ("int32",))
    _check_array("kv_lens", kv_lens, "[B]", ("int32",))
    _check_array("cu_q_lens", cu_q_lens, "[B + 1]", ("int32",))
    num_rows, num_tokens = page_table.shape[0], q.shape[0]
    if kv_lens.shape[0] != num_rows or cu_q_lens.shape[0] != num_rows + 1:
        raise ValueError(
            f"page_table has {num_rows} rows, kv_lens {kv_lens.shape[0]} and cu_q_lens {cu_q_lens.shape[0]}; "
            "they must be B, B and B + 1"
        )
    num_kv_heads = _check_heads(q.shape[1], q.shape[2], kv_pages.shape[2], num_kv_heads)
    _check_offset(page_offset, kv_pages)
    _check_scales(kv_scales, num_kv_heads)
    if abs(_check_number("scale", scale)) > MAX_NUMBER:
        raise ValueError(f"scale={scale} is beyond {MAX_NUMBER:g}, where float32 scores run out of range")
    if logit_soft_cap is not None:
        if _check_number("logit_soft_cap", logit_soft_cap) <= 0:
            raise ValueError(f"logit_soft_cap={logit_soft_cap} is not above 0; leave it out for no cap")
        if not 1 / MAX_NUMBER <= logit_soft_cap <= MAX_NUMBER:
            raise ValueError(
                f"logit_soft_cap={logit_soft_cap} is outside [{1 / MAX_NUMBER:g}, {MAX_NUMBER:g}], what float32 scores "
                "can be capped at; leave it out for no cap"
            )
    if sliding_window is not None and _check_integer("sliding_window", sliding_window) < 1:
        raise ValueError(
            f"sliding_window={sliding_window} is below 1, where a token sees itself alone; leave it out for no window"
        )
    if sliding_window is not None and sliding_window >= 2**31:
        raise ValueError(f"sliding_window={sliding_window} is no int32, as positions are; leave it out for no window")
    max_q_len = num_tokens if max_q_len is None else _check_integer("max_q_len", max_q_len)
    if not 1 <= max_q_len <= num_tokens:
        raise ValueError(f"max_q_len={max_q_len} is outside [1, {num_tokens}], the tokens of the step")
    return num_kv_heads, max_q_len


def check_write(kv_pages: Any, k: Any, v: Any, write_slots: Any, *, page_offset: Any, kv_scales: Any) -> None:
    """Nothing, if `write_kv` may be called so.

    Raises:
        ValueError, TypeError: as `check_attention`.
    """
    _check_pool(kv_pages)
    _check_array("k", k, "[T, G, H]", FLOAT_DTYPES)
    _check_array("v", v, "[T, G, H]", FLOAT_DTYPES)
    _check_array("write_slots", write_slots, "[T]", ("int32",))
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"k is {describe(k)} and v is {describe(v)}; they must be the same")
    if write_slots.shape[0] != k.shape[0]:
        raise ValueError(f"{k.shape[0]} tokens have {write_slots.shape[0]} write_slots; give one a token")
    _check_fit(k.shape[1], k.shape[2], kv_pages.shape[2])
    _check_offset(page_offset, kv_pages)
    _check_scales(kv_scales, k.shape[1])


def describe(array: Any) -> str:
    """dtype[shape]."""
    return f"{jnp.dtype(array.dtype).name}{list(array.shape)}"


def _check_pool(kv_pages: Any) -> None:
    _check_array("kv_pages", kv_pages, "[L * P, K, W]", POOL_DTYPES)


def _check_array(name: str, array: Any, shape: str, dtypes: tuple[str, ...]) -> None:
    num_axes = shape.count(",") + 1
    if len(array.shape) != num_axes or 0 in array.shape:
        raise ValueError(f"{name} is {describe(array)}; it must be {shape}, with no axis of length 0")
    if jnp.dtype(array.dtype).name not in dtypes:
        raise TypeError(f"{name} is {describe(array)}; its dtype must be {' or '.join(dtypes)}: cast it")


def _check_heads(num_heads: int, head_dim: int, width: int, num_kv_heads: Any) -> int:
    if num_kv_heads is None:
        num_kv_heads, rest = divmod(width, 2 * head_dim)
        if rest or not num_kv_heads:
            raise ValueError(
                f"pool lanes of width {width} are no multiple of 2 * {head_dim}, the K and V of a head; "
                "where the width is rounded up, give num_kv_heads"
            )
    elif _check_integer("num_kv_heads", num_kv_heads) < 1:
        raise ValueError(f"num_kv_heads={num_kv_heads} is below 1")
    num_kv_heads = int(num_kv_heads)
    _check_fit(num_kv_heads, head_dim, width)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} q heads can't share {num_kv_heads} kv heads evenly (width {width}, head_dim {head_dim}); "
            "where the width is rounded up, give num_kv_heads"
        )
    return num_kv_heads


def _check_fit(num_kv_heads: int, head_dim: int, width: int) -> None:
    needed = 2 * num_kv_heads * head_dim
    if needed > width:
        raise ValueError(
            f"K and V of {num_kv_heads} heads of {head_dim} take {needed} lanes and the pool has {width}; "
            f"make it at least 2 * G * H wide"
        )


def _check_offset(page_offset: Any, kv_pages: Any) -> None:
    if isinstance(page_offset, numbers.Integral) and not isinstance(page_offset, bool):
        if not 0 <= int(page_offset) < kv_pages.shape[0]:
            raise ValueError(f"page_offset={page_offset} is outside [0, {kv_pages.shape[0]}), the pages of the pool")
    elif getattr(page_offset, "shape", None) != () or page_offset.dtype != jnp.int32:
        raise TypeError(f"page_offset={page_offset!r} is neither an int nor an int32 scalar; give layer * num_pages")


def _check_scales(kv_scales: Any, num_kv_heads: int) -> None:
    if kv_scales is None:
        return
    if tuple(kv_scales.shape) != (num_kv_heads, 2) or kv_scales.dtype != jnp.float32:
        raise ValueError(
            f"kv_scales are {describe(kv_scales)}; they must be float32[{num_kv_heads}, 2]: what K and V of each "
            "kv head were divided by"
        )


def _check_number(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a number; it is static, so no traced value either")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} is not finite")
    return float(value)


def _check_integer(name: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not an integer; it is static, so no traced value either")
    return int(value)
