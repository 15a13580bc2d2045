"""Which implementation runs and why, and how a function of one's own is called in its place."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from radix_jax.attention_backends import AttentionFn, backend_names, registered_backends
from radix_jax.pallas_kernels.paged_attention.checks import describe
from radix_jax.pallas_kernels.paged_attention.xla import paged_attention_xla

# What Pallas Triton compiles for.
MIN_COMPUTE_CAPABILITY = (8, 0)
# Of a TPU's vector; a pool of another width is padded, and copied for the kernels.
TPU_LANES = 128
MIN_TPU_GENERATION = 4
TPU_BACKENDS = ("pallas_tpu", "pallas_tpu_interpret")
NUM_POSITIONAL = 5  # q, kv_pages, page_table, kv_lens, cu_q_lens
REQUIRED = ("page_offset", "scale")
# What every implementation is called with; one that lacks a keyword is called without while the value is this one.
DEFAULTS = {"sliding_window": None, "logit_soft_cap": None, "return_lse": False, "kv_scales": None}


class UnsupportedOption(NotImplementedError):
    """A backend does not take an option of `paged_attention` that is given."""


def attention_backend(requested: str = "auto", device: Any = None) -> tuple[str, str]:
    """(backend, reason): the implementation that `requested` stands for on a device.

    "auto" is pallas_gpu on an NVIDIA GPU of compute capability 8.0 and up, pallas_tpu on a TPU from v4 on, and xla
    everywhere else.

    device: a jax.Device. None: the first one of this process for "auto", and any for a name, as a program may be
    lowered for another machine.

    Raises:
        ValueError: an unknown name, or one of the kernels' on a device that can't run it.
    """
    if requested == "auto":
        device = jax.local_devices()[0] if device is None else device
        if device.platform == "tpu":
            obstacle = _obstacle_to_pallas_tpu(device)
            return ("xla", obstacle) if obstacle else ("pallas_tpu", f"this is {device.device_kind}")
        obstacle = _obstacle_to_pallas_gpu(device)
        if obstacle:
            return "xla", obstacle
        return "pallas_gpu", f"{device.device_kind} has compute capability {_dotted(compute_capability(device))}"
    attention_fn(requested)
    obstacle_to = {"pallas_gpu": _obstacle_to_pallas_gpu, "pallas_tpu": _obstacle_to_pallas_tpu}
    if requested in obstacle_to and device is not None and (obstacle := obstacle_to[requested](device)):
        raise ValueError(f"attention_backend={requested!r} can't run here: {obstacle}; use auto")
    return requested, "asked for"


def attention_fn(name: str) -> AttentionFn:
    """The function behind a name other than "auto". Whether the device can run it, `attention_backend` tells.

    Raises:
        ValueError: an unknown name; it lists the known ones.
    """
    if name == "xla":
        return paged_attention_xla
    if name in ("pallas_gpu", "pallas_interpret"):
        # Pallas is imported where it is used, and takes a while.
        from radix_jax.pallas_kernels.paged_attention.gpu import paged_attention_gpu

        return functools.partial(paged_attention_gpu, interpret=name == "pallas_interpret")
    if name in TPU_BACKENDS:
        from radix_jax.pallas_kernels.paged_attention.tpu import paged_attention_tpu

        return functools.partial(paged_attention_tpu, interpret=tpu_interpretation(name))
    if name in registered_backends():
        return registered_backends()[name]
    raise ValueError(
        f"attention backend {name!r} is not one of {', '.join(backend_names())}; "
        "register_attention_backend makes it one"
    )


def pool_width(num_kv_heads: int, head_dim: int, backend: str | AttentionFn = "auto") -> int:
    """W of a pool for a backend: 2 * num_kv_heads * head_dim, for the TPU kernels rounded up to 128 lanes."""
    width = 2 * num_kv_heads * head_dim
    if backend == "auto":
        backend, _ = attention_backend()
    return -(-width // TPU_LANES) * TPU_LANES if backend in TPU_BACKENDS else width


def tpu_interpretation(name: str) -> Any:
    """pallas_call's `interpret` for one of TPU_BACKENDS."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams() if name == "pallas_tpu_interpret" else False


def call_attention_fn(name: str, fn: AttentionFn, operands: tuple[jax.Array, ...], keywords: dict[str, Any]) -> Any:
    """fn(*operands, **keywords), without the keywords that it lacks and that are at their defaults, its result checked.

    keywords: all of the contract, `num_kv_heads` and `max_q_len` filled in.

    Raises:
        UnsupportedOption: a keyword that `fn` lacks has a value of its own.
        ValueError: `fn` gives something else than the contract's shapes and dtypes.
    """
    q, kv_pages = operands[:2]
    # Without num_kv_heads a function takes all lanes for heads.
    num_kv_heads, spare_lanes = divmod(kv_pages.shape[2], 2 * q.shape[2])
    defaults = {
        **DEFAULTS,
        "num_kv_heads": None if spare_lanes else num_kv_heads,
        "max_q_len": keywords["max_q_len"],
    }
    takes = _keyword_test(fn)
    given = {}
    for keyword, value in keywords.items():
        if takes(keyword):
            given[keyword] = value
        elif keyword in REQUIRED:
            raise TypeError(f"attention backend {name!r} takes no {keyword}, which every backend has to")
        elif value is not defaults[keyword] and (keyword == "kv_scales" or value != defaults[keyword]):
            shown = "given" if keyword == "kv_scales" else value
            raise UnsupportedOption(
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
    wanted = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if return_lse:
        wanted.append(jax.ShapeDtypeStruct(q.shape[:2], jnp.float32))
    parts = result if isinstance(result, tuple) else (result,)
    returned = " and ".join(describe(part) if hasattr(part, "dtype") else type(part).__name__ for part in parts)
    contract = " and ".join(map(describe, wanted))
    if returned != contract:
        raise ValueError(f"attention backend {name!r} returned {returned}; the contract is {contract}")


def _obstacle_to_pallas_tpu(device: Any) -> str | None:
    """Why the TPU kernels can't run on a device, or None."""
    if device.platform != "tpu":
        return f"the kernels are for TPUs, this is {device.platform}"
    generation = re.match(r"TPU ?v?(\d+)", device.device_kind)
    if generation is None or int(generation[1]) < MIN_TPU_GENERATION:
        return f"the kernels are for TPU v{MIN_TPU_GENERATION} and later, this is {device.device_kind}"
    return None


def _obstacle_to_pallas_gpu(device: Any) -> str | None:
    """Why the GPU kernels can't run on a device, or None."""
    if device.platform not in ("gpu", "cuda", "rocm"):
        return f"the kernels are for GPUs, this is {device.platform}"
    capability = compute_capability(device)
    if capability is None:
        return f"the kernels are for NVIDIA GPUs, this is {device.device_kind}"
    if capability < MIN_COMPUTE_CAPABILITY:
        return (
            f"{device.device_kind} has compute capability {_dotted(capability)}, "
            f"the kernels need {_dotted(MIN_COMPUTE_CAPABILITY)}"
        )
    return None


def compute_capability(device: Any) -> tuple[int, ...] | None:
    """Of an NVIDIA GPU, e.g. (9, 0); None of any other device. AMD's GPUs have a name there, such as gfx942."""
    parts = str(getattr(device, "compute_capability", "")).split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None


def _dotted(capability: tuple[int, ...] | None) -> str:
    return ".".join(map(str, capability or ()))
