"""Which implementation runs and why, and how a function of one's own is called in its place."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from radix_jax.attention_backends import AttentionFn, backend_names, registered_backends
from radix_jax.pallas_kernels.paged_attention.checks import describe
from radix_jax.pallas_kernels.paged_attention.xla import paged_attention_xla

# What Pallas Triton compiles for.
MIN_COMPUTE_CAPABILITY = (8, 0)
NUM_POSITIONAL = 5  # q, kv_pages, page_table, kv_lens, cu_q_lens
REQUIRED = ("page_offset", "scale")
# What every implementation is called with; one that lacks a keyword is called without while the value is this one.
DEFAULTS = {"sliding_window": None, "logit_soft_cap": None, "return_lse": False, "kv_scales": None}


def attention_backend(requested: str = "auto", device: jax.Device | None = None) -> tuple[str, str]:
    """(backend, reason): the implementation that `requested` stands for on a device.

    device: None: the first one of this process. "auto" is pallas_gpu on an NVIDIA GPU of compute capability 8.0 and up,
    and xla everywhere else.

    Raises:
        ValueError: an unknown name, or pallas_gpu on a device that can't run it.
        NotImplementedError: a backend that is not built yet.
    """
    device = jax.local_devices()[0] if device is None else device
    if requested not in ("auto", "pallas_gpu"):
        attention_fn(requested)
        return requested, "asked for"
    obstacle = _obstacle_to_pallas_gpu(device)
    if requested == "pallas_gpu":
        if obstacle:
            raise ValueError(f"attention_backend='pallas_gpu' can't run here: {obstacle}; use auto, or pallas_interpret")
        return "pallas_gpu", "asked for"
    if obstacle:
        return "xla", obstacle
    return "pallas_gpu", f"{device.device_kind} has compute capability {_compute_capability(device)}"


def attention_fn(name: str) -> AttentionFn:
    """The function behind a name. It is only looked up: whether the device can run it, `attention_backend` tells.

    Raises:
        ValueError: an unknown name; it lists the known ones.
        NotImplementedError: a backend that is not built yet.
    """
    if name == "auto":
        return attention_fn(attention_backend()[0])
    if name == "xla":
        return paged_attention_xla
    if name in ("pallas_gpu", "pallas_interpret"):
        # Pallas is imported where it is used, and takes a while.
        from radix_jax.pallas_kernels.paged_attention.gpu import paged_attention_gpu

        return functools.partial(paged_attention_gpu, interpret=name == "pallas_interpret")
    if name == "pallas_tpu":
        raise NotImplementedError("attention_backend='pallas_tpu' is not built yet; use auto, which is xla on a TPU")
    if name in registered_backends():
        return registered_backends()[name]
    raise ValueError(
        f"attention_backend={name!r} is not one of {', '.join(map(repr, backend_names()))}; "
        "register_attention_backend makes it one"
    )


def call_attention_fn(name: str, fn: AttentionFn, operands: tuple[jax.Array, ...], keywords: dict[str, Any]) -> Any:
    """fn(*operands, **keywords), without the keywords that it lacks and that are at their defaults, its result checked.

    keywords: all of the contract, `num_kv_heads` and `max_q_len` filled in.

    Raises:
        NotImplementedError: a keyword that `fn` lacks has a value of its own.
        TypeError: `fn` gives something else than the contract's shapes and dtypes.
    """
    q, kv_pages = operands[:2]
    defaults = {**DEFAULTS, "num_kv_heads": kv_pages.shape[2] // (2 * q.shape[2]), "max_q_len": keywords["max_q_len"]}
    takes = _keyword_test(fn)
    given = {}
    for keyword, value in keywords.items():
        if takes(keyword):
            given[keyword] = value
        elif keyword in REQUIRED:
            raise TypeError(f"attention backend {name!r} takes no {keyword}, which every backend has to")
        elif value is not defaults[keyword] and (keyword == "kv_scales" or value != defaults[keyword]):
            shown = "given" if keyword == "kv_scales" else value
            raise NotImplementedError(
                f"attention backend {name!r} takes no {keyword}, and here it is {shown}; add it to the function, or "
                "choose another backend"
            )
    result = fn(*operands, **given)
    _check_result(name, result, q, return_lse=keywords["return_lse"])
    return result


def _keyword_test(fn: AttentionFn) -> Callable[[str], bool]:
    """Whether a keyword can be given to `fn`; all can where it can't be told."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return lambda keyword: True
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return lambda keyword: True
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_keyword = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return (by_keyword - set(positional[:NUM_POSITIONAL])).__contains__


def _check_result(name: str, result: Any, q: jax.Array, *, return_lse: bool) -> None:
    wanted = [("out", q.shape, q.dtype)]
    if return_lse:
        wanted.append(("lse", q.shape[:2], jnp.dtype("float32")))
    expected = ", ".join(f"{part} {jnp.dtype(dtype).name}{list(shape)}" for part, shape, dtype in wanted)
    parts = result if return_lse and isinstance(result, tuple) else (result,)
    fits = len(parts) == len(wanted) and all(
        (getattr(part, "shape", None), getattr(part, "dtype", None)) == (shape, dtype)
        for part, (_, shape, dtype) in zip(parts, wanted, strict=True)
    )
    if not fits:
        shown = ", ".join(describe(part) if hasattr(part, "dtype") else type(part).__name__ for part in parts)
        raise TypeError(f"attention backend {name!r} gives {shown}; it must give {expected}")


def _obstacle_to_pallas_gpu(device: jax.Device) -> str | None:
    """Why the GPU kernels can't run on a device, or None."""
    if device.platform not in ("gpu", "cuda", "rocm"):
        return f"no kernel of ours is built for {device.platform}"
    capability = _compute_capability(device)
    # AMD's are names, such as gfx942.
    parts = capability.split(".")
    if not all(part.isdecimal() for part in parts):
        return f"the GPU kernels are for NVIDIA's, and {device.device_kind} is {capability or 'of another make'}"
    if tuple(map(int, parts)) < MIN_COMPUTE_CAPABILITY:
        least = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
        return f"{device.device_kind} has compute capability {capability}, and the GPU kernels need {least}"
    return None


def _compute_capability(device: jax.Device) -> str:
    return str(getattr(device, "compute_capability", ""))
