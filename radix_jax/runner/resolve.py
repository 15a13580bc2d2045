"""What the settings that were left open stand for, on this model and this machine."""

import dataclasses
import logging
import os
from pathlib import Path

import jax
import numpy as np

from radix_jax.config import DETERMINISTIC_STEP_LEN, EngineConfig
from radix_jax.functional import MAX_SLOTS, kv_width
from radix_jax.models.base import ModelConfig, ModelParams
from radix_jax.pallas_kernels.paged_attention import attention_backend
from radix_jax.pallas_kernels.paged_attention.backends import (
    MIN_COMPUTE_CAPABILITY,
    TPU_BACKENDS,
    UnsupportedOption,
    compute_capability,
)
from radix_jax.plan import row_counts, token_counts
from radix_jax.runner.sampler_state import sampler_state_bytes

_LOG = logging.getLogger("radix_jax")
DEFAULT_MEMORY_FRACTION = 0.85
CPU_MAX_MODEL_LEN = 4096
CPU_POOL_BYTES = 2 * 1024**3
CPU_RAM_FRACTION = 0.25


def default_dtype() -> str:
    """Of weights: float32 on a CPU, float16 on a GPU that has no bfloat16 (below compute capability 8.0, said in the
    log), bfloat16 on other accelerators."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return "float32"
    capability = compute_capability(device)
    if capability is not None and capability < MIN_COMPUTE_CAPABILITY:
        _LOG.info("dtype float16: %s has no bfloat16", device.device_kind)
        return "float16"
    return "bfloat16"


def resolve_config(config: EngineConfig, params: ModelParams) -> EngineConfig:
    """`config` with dtype, kv_dtype, attention_backend, max_model_len, num_pages and max_pinned_tokens filled in.

    Raises:
        ValueError: dtype or max_model_len that the model does not have, a backend that the device can't run, or no room
            for a pool.
    """
    on_cpu = jax.default_backend() == "cpu"
    backend, reason = attention_backend(config.attention_backend, jax.local_devices()[0])
    _LOG.info("attention by %s: %s", backend, reason)
    dtype = jax.tree.leaves(params.weights)[0].dtype.name
    if config.dtype not in (None, dtype):
        raise ValueError(f"dtype={config.dtype!r}, but params are {dtype}; cast them, or leave dtype out")
    longest = params.config.max_position_embeddings
    most = CPU_MAX_MODEL_LEN if on_cpu else longest
    if backend in TPU_BACKENDS:
        backend, limit = tpu_limits(config, params.config, dtype)
        most = min(most, limit)
    max_model_len = config.max_model_len or min(longest, most)
    if max_model_len > longest:
        raise ValueError(f"max_model_len={max_model_len} exceeds the {longest} positions of the model; lower it")
    # XLA widens a bfloat16 scatter to float32 over the whole pool on a CPU.
    kv_dtype = config.kv_dtype or ("float32" if on_cpu else dtype)
    if on_cpu and kv_dtype != "float32":
        _LOG.warning("kv_dtype=%s is slow on a CPU: each step converts the whole pool; leave it out", kv_dtype)
    num_pages = config.num_pages or _choose_num_pages(params.config, config, backend, max_model_len, kv_dtype)
    most_pinned = config.max_pinned_tokens
    return dataclasses.replace(
        config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention_backend=backend,
        max_model_len=max_model_len,
        num_pages=num_pages,
        kv_memory_fraction=None,
        max_pinned_tokens=(num_pages - 1) * config.page_size // 2 if most_pinned is None else most_pinned,
    )


def tpu_limits(config: EngineConfig, model: ModelConfig, dtype: str) -> tuple[str, int]:
    """(backend, most tokens of a request) where the TPU kernels are wanted: what was asked for; of what was left open
    pallas_tpu, or xla where they can't do this pool. What scalar memory has room for is logged.

    dtype: of the weights.

    Raises:
        ValueError: a pool or a max_model_len that they can't do, and that were asked for, or too many requests.
    """
    from radix_jax.pallas_kernels.paged_attention.tpu_limits import max_row_len

    kv_dtype, longest = np.dtype(config.kv_dtype or dtype), model.max_position_embeddings
    num_rows = DETERMINISTIC_STEP_LEN if config.deterministic else row_counts(config.max_running_requests)[-1]
    num_tokens = token_counts(config.limits.max_prefill_tokens)[-1]
    q_dtype = kv_dtype if kv_dtype.itemsize > 1 else np.dtype(dtype)
    q = jax.ShapeDtypeStruct((num_tokens, model.num_heads, model.head_dim), q_dtype)
    kv_pages = jax.ShapeDtypeStruct((1, config.page_size, kv_width(model, "pallas_tpu")), kv_dtype)
    try:
        most = max_row_len(q, kv_pages, num_rows, num_kv_heads=model.num_kv_heads)
    except UnsupportedOption as obstacle:
        if config.attention_backend != "auto":
            raise ValueError(str(obstacle)) from obstacle
        _LOG.warning("attention by xla, slowly: %s", obstacle)
        return "xla", longest
    told = (
        f"max_model_len {most} at most: page tables of {num_rows} rows in pages of {config.page_size}, with the work "
        f"lists of steps of {num_tokens} tokens, fill the TPU's scalar memory; raise page_size or lower "
        "max_running_requests for more"
    )
    if config.max_model_len is not None and config.max_model_len > most:
        raise ValueError(f"max_model_len={config.max_model_len}, and {told}")
    if not most:
        raise ValueError(told)
    _LOG.info("%s", told)
    return "pallas_tpu" if config.attention_backend == "auto" else config.attention_backend, min(longest, most)


def _choose_num_pages(model: ModelConfig, config: EngineConfig, backend: str, max_model_len: int, kv_dtype: str) -> int:
    """Pages of the pool, the null page included, that the memory allows. Logs what binds.

    On an accelerator: `kv_memory_fraction` (0.85) of the memory that is free now, with the weights in place and the
    sampler's state taken off. On a CPU: what max_running_requests requests of max_model_len need, at most 2 GiB and a
    quarter of the free RAM.

    Raises:
        ValueError: not even two pages fit.
    """
    page_bytes = model.num_layers * config.page_size * kv_width(model, backend) * np.dtype(kv_dtype).itemsize
    sampler_bytes = sampler_state_bytes(config.max_running_requests, model.vocab_size)
    pages_a_request = -(-max_model_len // config.page_size)
    limits = {
        "max_running_requests x max_model_len": config.max_running_requests * pages_a_request + 1,
        "int32 slots": MAX_SLOTS // (model.num_layers * config.page_size),
    }
    if jax.default_backend() == "cpu" and config.kv_memory_fraction is None:
        limits["2 GiB on a CPU"] = CPU_POOL_BYTES // page_bytes
        limits["a quarter of the free RAM"] = int((free_ram_bytes() - sampler_bytes) * CPU_RAM_FRACTION) // page_bytes
    else:
        fraction = config.kv_memory_fraction or DEFAULT_MEMORY_FRACTION
        limits[f"{fraction:.2f} of the free memory"] = (
            int((_free_device_bytes() - sampler_bytes) * fraction) // page_bytes
        )
    binding = min(limits, key=lambda name: limits[name])
    num_pages = limits[binding]
    if num_pages < 2:
        raise ValueError(f"{binding} has room for {num_pages} pages of {page_bytes} bytes, 2 are needed; free memory")
    _LOG.info("pool of %d pages, %.0f MB; bound by %s", num_pages, num_pages * page_bytes / 1e6, binding)
    return num_pages


def free_ram_bytes() -> int:
    """RAM that this process may still take: of the machine, and of the control group where one limits it."""
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free_bytes = min(free_bytes, max(0, int(limit.read_text()) - int(used.read_text())))
    return free_bytes


def _free_device_bytes() -> int:
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats:
        return free_ram_bytes()
    return stats["bytes_limit"] - stats["bytes_in_use"]
