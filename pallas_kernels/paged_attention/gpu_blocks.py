"""Sizes of the GPU kernels' tiles: data, not code.

`gpu_blocks.json` beside this module holds the shipped choices; a file of the same name and form in the user's cache
folder (`radix_jax.cache_dir.user_cache_dir()`, written by `radix-jax tune`) goes before it. The form:

    {"NVIDIA H200": [
        {"kernel": "decode", "lanes": 128, "q_bytes": 2, "kv_bytes": 2, "group_size": 4,
         "block_len": 64, "num_warps": 4, "num_stages": 3, "programs": 396},
        {"kernel": "extend", "lanes": 128, "q_bytes": 2, "kv_bytes": 2, "group_size": 4,
         "num_rows": 128, "block_len": 64, "num_warps": 8, "num_stages": 2}]}

Keys of the file are a device kind as jax names it, a compute capability ("sm_89"), all of a generation ("sm_8"), or
"default", looked up in that order, the user's file first. The shipped "default" is for GPUs with 227 KB of shared
memory a block, H100 and later; "sm_8" and "sm_12" stay below 99 KB. The first entry of a list that fits counts. `lanes`
is head_dim rounded up to a power of two, `kv_bytes` the element size of the pool, `q_bytes` that of the queries or, if
larger, of the pool; an entry without `lanes`, `q_bytes`, `kv_bytes` or `group_size` fits all of them. It gives:

block_len: tokens of K and V a program takes at a time. num_rows: (token, head of a group) pairs of an extend tile.
num_warps, num_stages: Triton's. programs: decode programs that the GPU holds at once; rows are split to fill it.
Sizes are powers of two, but for `num_stages` and `programs`.
"""

import contextlib
import contextvars
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from radix_jax.cache_dir import user_cache_dir

FILE_NAME = "gpu_blocks.json"
DEFAULT_DEVICE = "default"
# Longer rows gain as much from the splits that suit this length; a table's capacity may be far above what rows have.
ASSUMED_LEN = 4096
MAX_SPLITS = 64
_lowering_for: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("lowering_for", default=())
_SHARED_KEYS = ("block_len", "num_warps", "num_stages")
_CHOICE_KEYS = {"decode": (*_SHARED_KEYS, "programs"), "extend": (*_SHARED_KEYS, "num_rows")}
_MATCH_KEYS = ("lanes", "q_bytes", "kv_bytes", "group_size")
_ANY_SIZE = ("num_stages", "programs")


@dataclass(frozen=True)
class DecodeBlocks:
    """Of the decode kernel: tokens a step, splits of a row, and Triton's warps and pipeline stages."""

    block_len: int
    num_splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExtendBlocks:
    """Of the extend kernel: rows of a tile, tokens a step, and Triton's warps and pipeline stages."""

    num_rows: int
    block_len: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class GpuBlocks:
    """Of both."""

    decode: DecodeBlocks
    extend: ExtendBlocks


def choose_blocks(
    *,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    q_dtype: Any,
    pool_dtype: Any,
    num_rows: int,
    visible_len: int,
    devices: tuple[str, ...] | None = None,
) -> GpuBlocks:
    """The blocks for `num_rows` rows of which a query sees up to `visible_len` tokens.

    devices: names to look up before "default", e.g. ("NVIDIA L4", "sm_89", "sm_8"); None: those of `lowering_for`, else
        of the GPU at hand.

    Raises:
        ValueError: a broken file.
    """
    group_size = num_heads // num_kv_heads
    wanted = {
        "lanes": power_of_two(head_dim),
        "q_bytes": max(jnp.dtype(q_dtype).itemsize, jnp.dtype(pool_dtype).itemsize),
        "kv_bytes": jnp.dtype(pool_dtype).itemsize,
        "group_size": group_size,
    }
    if devices is None:
        devices = _lowering_for.get() or local_devices()
    names = (*devices, DEFAULT_DEVICE)
    decode, extend = (_find(kernel, names, tuple(wanted.values())) for kernel in ("decode", "extend"))
    return GpuBlocks(
        DecodeBlocks(
            decode["block_len"],
            num_splits(decode["programs"], decode["block_len"], num_rows * num_kv_heads, visible_len),
            decode["num_warps"],
            decode["num_stages"],
        ),
        # A tile holds at least one token's whole group.
        ExtendBlocks(
            max(extend["num_rows"], power_of_two(group_size)),
            extend["block_len"],
            extend["num_warps"],
            extend["num_stages"],
        ),
    )


@contextlib.contextmanager
def lowering_for(devices: tuple[str, ...]) -> Iterator[None]:
    """What is traced inside gets the blocks of a GPU of these names, which need not be there."""
    token = _lowering_for.set(devices)
    try:
        yield
    finally:
        _lowering_for.reset(token)


def num_splits(programs: int, block_len: int, num_pairs: int, visible_len: int) -> int:
    """Into how many parts each of `num_pairs` (row, kv head) pairs is split, on a GPU that holds `programs` at once.

    Fewest block times until the last wave of programs is done, for rows of `visible_len` tokens: a wave takes as long
    as a split has blocks, and about one more to start and to merge.
    """
    num_blocks = max(1, min(visible_len, ASSUMED_LEN) // block_len)

    def block_times(splits: int) -> float:
        return -(-num_pairs * splits // programs) * (num_blocks / splits + 1.0)

    return min(range(1, min(num_blocks, MAX_SPLITS) + 1), key=block_times)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`, and at least 16: what a tile can be."""
    return max(16, 1 << (size - 1).bit_length())


@functools.cache
def local_devices() -> tuple[str, ...]:
    """Names of the GPU at hand, the nearest first; none where there is no GPU."""
    if jax.default_backend() != "gpu":
        return ()
    device = jax.local_devices()[0]
    major, minor = str(device.compute_capability).split(".")
    return device.device_kind, f"sm_{major}{minor}", f"sm_{major}"


@functools.cache
def _find(kernel: str, names: tuple[str, ...], wanted: tuple[int, ...]) -> dict[str, Any]:
    for path in (user_cache_dir() / FILE_NAME, Path(__file__).with_name(FILE_NAME)):
        if not path.exists():
            continue
        choices = load_choices(path)
        for name in names:
            for entry in choices.get(name, ()):
                fits = all(entry.get(key, value) == value for key, value in zip(_MATCH_KEYS, wanted, strict=True))
                if entry["kernel"] == kernel and fits:
                    return entry
    raise ValueError(f"{FILE_NAME} has no {kernel} blocks for {dict(zip(_MATCH_KEYS, wanted, strict=True))}")


def forget_files() -> None:
    """Read the files anew the next time: a tuned one was written."""
    _find.cache_clear()


def load_choices(path: Path) -> dict[str, list[dict[str, Any]]]:
    """What a file of block choices holds, checked.

    Raises:
        ValueError: a file that is not of the form above; it names the file, the entry and the rule.
    """
    try:
        choices = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); delete it or run radix-jax tune again") from error
    if not isinstance(choices, dict) or not all(isinstance(entries, list) for entries in choices.values()):
        raise ValueError(f"{path} has to map a device kind to a list of entries; delete it or run radix-jax tune again")
    for device, entries in choices.items():
        for entry in entries:
            reason = _fault(entry)
            if reason:
                raise ValueError(f"{path}: entry {entry} of {device!r} {reason}; delete it or run radix-jax tune again")
    return choices


def _fault(entry: Any) -> str | None:
    """What is wrong with an entry, if anything."""
    if not isinstance(entry, dict) or entry.get("kernel") not in _CHOICE_KEYS:
        return f"is of no kernel of {', '.join(_CHOICE_KEYS)}"
    needed = _CHOICE_KEYS[entry["kernel"]]
    if missing := [key for key in needed if key not in entry]:
        return f"lacks {', '.join(missing)}"
    if unknown := sorted(set(entry) - {"kernel", *needed, *_MATCH_KEYS}):
        return f"has unknown {', '.join(unknown)}"
    for key, value in entry.items():
        if key == "kernel":
            continue
        if type(value) is not int or value < 1:
            return f"has {key}={value!r}, which is no positive integer"
        if key in ("block_len", "num_rows") and value < 16:
            return f"has {key}={value}, below 16"
        if key in needed and key not in _ANY_SIZE and value & (value - 1):
            return f"has {key}={value}, no power of two"
    return None
