"""Block choices of the GPU kernels, measured on the GPU at hand and kept in the user's cache folder.

Every tile that the kernels can have is compiled, compared with the XLA form and timed; the quickest right one counts.
What it gives goes into `gpu_blocks.json` in `user_cache_dir()`, in the form that
`radix_jax.pallas_kernels.paged_attention.gpu_blocks` reads before the shipped file.
"""

import dataclasses
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from radix_jax.cache_dir import user_cache_dir
from radix_jax.device_timing import time_calls
from radix_jax.pallas_kernels.paged_attention import attention_backend
from radix_jax.pallas_kernels.paged_attention.gpu import paged_attention_gpu
from radix_jax.pallas_kernels.paged_attention.gpu_blocks import (
    FILE_NAME,
    DecodeBlocks,
    ExtendBlocks,
    GpuBlocks,
    choose_blocks,
    forget_files,
    load_choices,
    num_splits,
    power_of_two,
)
from radix_jax.pallas_kernels.paged_attention.xla import paged_attention_xla

# Seconds a call of fn(*args), whose result can be its first argument again.
Timer = Callable[[Callable[..., jax.Array], tuple[Any, ...]], float]
Blocks = DecodeBlocks | ExtendBlocks
# Entries with the same of these are about the same calls.
_SAME_CALLS = ("kernel", "lanes", "q_bytes", "kv_bytes", "group_size")
# Nothing is quicker; a difference of noisy times can come out as 0.
_LEAST_S = 1e-9
# Rounding to TF32, which the XLA form's matmuls of float32 may do on a GPU.
_TF32_EPS = 2.0**-10


@dataclass(frozen=True)
class TuneShape:
    """Calls to be tuned for. num_rows: rows of a decode step. context_len: tokens of each row. chunk_rows, chunk_len:
    rows of a prefill step and new tokens of each, the rest of the context before them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    page_size: int = 16
    num_rows: int = 64
    context_len: int = 4096
    chunk_rows: int = 4
    chunk_len: int = 512

    @property
    def kv_bytes(self) -> int:
        """Of a decode step, in one layer."""
        width = 2 * self.num_kv_heads * self.head_dim
        return self.num_rows * self.context_len * width * jnp.dtype(self.kv_dtype).itemsize


@dataclass(frozen=True)
class Candidates:
    """Sizes to be tried, all with all. programs: of decode, to derive splits from."""

    block_len: tuple[int, ...] = (32, 64, 128)
    num_rows: tuple[int, ...] = (32, 64, 128)
    num_warps: tuple[int, ...] = (2, 4, 8)
    num_stages: tuple[int, ...] = (2, 3, 4)
    programs: tuple[int, ...] = (132, 264, 396, 528, 660, 792, 1056)


@dataclass(frozen=True)
class Trial:
    """One choice. seconds: None if it is wrong or does not run; fault: how."""

    blocks: Blocks
    seconds: float | None
    fault: str = ""


@dataclass(frozen=True)
class Tuned:
    """What was found for a kernel. before, best: the blocks in use so far and the quickest ones, with seconds a call.
    entry: of the best, for the file; None: the blocks in use are the best. num_trials, num_faults: tiles tried, and
    those of them that are wrong or do not run."""

    kernel: str
    before: Blocks
    before_s: float
    best: Blocks
    best_s: float
    entry: dict[str, Any] | None
    num_trials: int
    num_faults: int


def check_device() -> str:
    """Name of the GPU at hand.

    Raises:
        ValueError: there is none, or one that the kernels can't run on.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        raise ValueError("tune measures on a GPU, and jax sees none here; nothing was written")
    attention_backend("pallas_gpu", device)
    return device.device_kind


def tune(
    shape: TuneShape,
    *,
    candidates: Candidates | None = None,
    timer: Timer = time_calls,
    interpret: bool = False,
    on_trial: Callable[[Trial], None] | None = None,
) -> list[Tuned]:
    """The best blocks of decode and extend for a shape; nothing is written.

    timer: measures a call. interpret: of the kernels. on_trial: called after each choice.

    Raises:
        ValueError: no room on the device, a broken file of choices, or blocks in use that are wrong themselves.
    """
    _check_room(shape)
    bench = _Bench(shape, candidates or Candidates(), timer, interpret, on_trial or (lambda _: None))
    return [bench.tune_decode(), bench.tune_extend()]


class _Bench:
    """What is measured on, and how."""

    def __init__(
        self,
        shape: TuneShape,
        candidates: Candidates,
        timer: Timer,
        interpret: bool,
        on_trial: Callable[[Trial], None],
    ) -> None:
        self._shape, self._candidates, self._timer = shape, candidates, timer
        self._interpret, self._on_trial = interpret, on_trial
        pages_per_row = -(-shape.context_len // shape.page_size)
        self._num_pages = max(shape.num_rows, shape.chunk_rows) * pages_per_row
        pool_shape = (self._num_pages, shape.page_size, 2 * shape.num_kv_heads * shape.head_dim)
        normal = jax.jit(lambda key: jax.random.normal(key, pool_shape, jnp.bfloat16).astype(shape.kv_dtype))
        self._pool = normal(jax.random.key(0))
        self._table = np.random.default_rng(0).permutation(self._num_pages).astype(np.int32).reshape(-1, pages_per_row)

    def tune_decode(self) -> Tuned:
        """First the tile, with the splits of now; then how many programs the GPU is to be filled with."""
        args, in_use = self._args(self._shape.num_rows, 1), self._in_use(self._shape.num_rows)
        sizes = itertools.product(self._candidates.block_len, self._candidates.num_warps, self._candidates.num_stages)
        tiles = [
            dataclasses.replace(in_use.decode, block_len=block_len, num_warps=num_warps, num_stages=num_stages)
            for block_len, num_warps, num_stages in sizes
        ]
        trials = self._try("decode", in_use, tiles, args, 1)
        tile = _quickest(trials).blocks
        assert isinstance(tile, DecodeBlocks)
        programs, split_tile = self._tune_programs(in_use, tile)
        split_trials = self._try("decode", in_use, [split_tile], args, 1)
        sizes = {**_tile_of(split_tile), "programs": programs}
        return self._tuned("decode", split_trials, sizes, trials)

    def tune_extend(self) -> Tuned:
        """The tile, for chunks over a prefix."""
        shape, in_use = self._shape, self._in_use(self._shape.chunk_rows)
        args = self._args(shape.chunk_rows, shape.chunk_len)
        group_size = shape.num_heads // shape.num_kv_heads
        sizes = itertools.product(
            [rows for rows in self._candidates.num_rows if rows >= power_of_two(group_size)],
            self._candidates.block_len,
            self._candidates.num_warps,
            self._candidates.num_stages,
        )
        trials = self._try("extend", in_use, [ExtendBlocks(*each) for each in sizes], args, shape.chunk_len)
        best = _quickest(trials).blocks
        assert isinstance(best, ExtendBlocks)
        return self._tuned("extend", trials, {"num_rows": best.num_rows, **_tile_of(best)}, trials)

    def _tuned(self, kernel: str, last: list[Trial], sizes: dict[str, int], trials: list[Trial]) -> Tuned:
        """last: the trials that decide, of which the first is of the blocks in use."""
        before, best = last[0], _quickest(last)
        assert before.seconds is not None
        assert best.seconds is not None
        return Tuned(
            kernel=kernel,
            before=before.blocks,
            before_s=before.seconds,
            best=best.blocks,
            best_s=best.seconds,
            entry=None if best is before else {"kernel": kernel, **self._keys(), **sizes},
            num_trials=len(trials),
            num_faults=sum(trial.seconds is None for trial in trials),
        )

    def _tune_programs(self, in_use: GpuBlocks, tile: DecodeBlocks) -> tuple[int, DecodeBlocks]:
        """(programs, the tile with the splits they give) for which one row, some and all are slowest the least."""
        shape = self._shape
        row_counts = sorted({1, max(1, shape.num_rows // 8), shape.num_rows})
        seconds: dict[tuple[int, int], float] = {}
        slowness = dict.fromkeys(self._candidates.programs, 0.0)
        for num_rows in row_counts:
            splits = {programs: self._splits(programs, tile, num_rows) for programs in self._candidates.programs}
            args = self._args(num_rows, 1)
            for count in sorted(set(splits.values())):
                blocks = dataclasses.replace(tile, num_splits=count)
                trial = self._trial(dataclasses.replace(in_use, decode=blocks), blocks, args, 1)
                seconds[num_rows, count] = np.inf if trial.seconds is None else trial.seconds
            least = min(seconds[num_rows, count] for count in splits.values())
            for programs, count in splits.items():
                slowness[programs] += seconds[num_rows, count] / least if np.isfinite(least) else 0.0
        programs = min(slowness, key=lambda programs: slowness[programs])
        return programs, dataclasses.replace(tile, num_splits=self._splits(programs, tile, shape.num_rows))

    def _try(
        self, kernel: str, in_use: GpuBlocks, tiles: Sequence[Blocks], args: tuple[Any, ...], max_q_len: int
    ) -> list[Trial]:
        """Trials of the blocks in use, which come first, and of others; each compared with the XLA form."""
        xla: Any = paged_attention_xla
        right = _outputs(functools.partial(xla, **self._keywords(max_q_len)), args)
        first: Blocks = getattr(in_use, kernel)
        trials = [
            self._trial(dataclasses.replace(in_use, **{kernel: blocks}), blocks, args, max_q_len, right)
            for blocks in (first, *(tile for tile in tiles if tile != first))
        ]
        if trials[0].seconds is None:
            raise ValueError(f"the {kernel} blocks in use, {first}, fail here: {trials[0].fault}")
        return trials

    def _trial(
        self,
        all_blocks: GpuBlocks,
        blocks: Blocks,
        args: tuple[Any, ...],
        max_q_len: int,
        right: np.ndarray | None = None,
    ) -> Trial:
        """right: what it has to give; None: not compared."""
        kernels: Any = paged_attention_gpu
        fn = functools.partial(kernels, blocks=all_blocks, interpret=self._interpret, **self._keywords(max_q_len))
        try:
            fault = "" if right is None else self._fault(_outputs(fn, args), right)
            trial = Trial(blocks, None if fault else max(self._timer(fn, args), _LEAST_S), fault)
        except Exception as error:  # whatever a compiler raises for a tile that does not fit
            trial = Trial(blocks, None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        self._on_trial(trial)
        return trial

    def _fault(self, given: np.ndarray, right: np.ndarray) -> str:
        eps = max(float(jnp.finfo(self._shape.dtype).eps), _TF32_EPS)
        error, allowed = float(np.abs(given - right).max()), 8 * eps * float(np.abs(right).max())
        return "" if error <= allowed else f"is off by {error:.2g}, rounding is {allowed:.2g} at most"

    def _args(self, num_rows: int, q_len: int) -> tuple[Any, ...]:
        """q, pool, page table, kv_lens, cu_q_lens."""
        shape = self._shape
        q_len = min(q_len, shape.context_len)
        q = jax.random.normal(jax.random.key(1), (num_rows * q_len, shape.num_heads, shape.head_dim), jnp.float32)
        return (
            q.astype(shape.dtype),
            self._pool,
            jnp.asarray(self._table[:num_rows]),
            jnp.full(num_rows, shape.context_len, jnp.int32),
            jnp.arange(num_rows + 1, dtype=jnp.int32) * q_len,
        )

    def _keywords(self, max_q_len: int) -> dict[str, Any]:
        return {
            "page_offset": 0,
            "scale": self._shape.head_dim**-0.5,
            "sliding_window": None,
            "logit_soft_cap": None,
            "return_lse": False,
            "num_kv_heads": self._shape.num_kv_heads,
            "kv_scales": None,
            "max_q_len": min(max_q_len, self._shape.context_len),
        }

    def _in_use(self, num_rows: int) -> GpuBlocks:
        shape = self._shape
        return choose_blocks(
            head_dim=shape.head_dim,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            q_dtype=shape.dtype,
            pool_dtype=shape.kv_dtype,
            num_rows=num_rows,
            visible_len=self._table.shape[1] * shape.page_size,
        )

    def _splits(self, programs: int, tile: DecodeBlocks, num_rows: int) -> int:
        visible_len = self._table.shape[1] * self._shape.page_size
        return num_splits(programs, tile.block_len, num_rows * self._shape.num_kv_heads, visible_len)

    def _keys(self) -> dict[str, int]:
        shape = self._shape
        kv_bytes = jnp.dtype(shape.kv_dtype).itemsize
        return {
            "lanes": power_of_two(shape.head_dim),
            "q_bytes": max(jnp.dtype(shape.dtype).itemsize, kv_bytes),
            "kv_bytes": kv_bytes,
            "group_size": shape.num_heads // shape.num_kv_heads,
        }


def write_choices(device_kind: str, entries: Sequence[dict[str, Any]], path: Path | None = None) -> Path:
    """Put entries in front of those that the file has for a device; entries about the same calls go. The file's path.

    path: None: the user's file. Nobody ever sees half of it.

    Raises:
        ValueError: the file that is there is broken.
        OSError: it can't be written.
    """
    path = path or user_cache_dir() / FILE_NAME
    choices = load_choices(path) if path.exists() else {}
    replaced = {_calls_of(entry) for entry in entries}
    kept = [entry for entry in choices.get(device_kind, []) if _calls_of(entry) not in replaced]
    choices[device_kind] = [*entries, *kept]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tune-") as scratch:
        written = Path(scratch) / FILE_NAME
        written.write_text(_as_json(choices))
        load_choices(written)
        os.replace(written, path)
    forget_files()
    return path


def _as_json(choices: dict[str, list[dict[str, Any]]]) -> str:
    """One line an entry."""
    devices = [
        f"  {json.dumps(device)}: [\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in entries) + "\n  ]"
        for device, entries in choices.items()
    ]
    return "{\n" + ",\n".join(devices) + "\n}\n"


def _calls_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(key) for key in _SAME_CALLS)


def _check_room(shape: TuneShape) -> None:
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None and shape.kv_bytes > limit // 3:
        raise ValueError(
            f"{shape.num_rows} rows of {shape.context_len} tokens take {shape.kv_bytes / 1e9:.1f} GB, more than a "
            f"third of the device's {limit / 1e9:.1f} GB; lower max_running_requests or context"
        )


def _outputs(fn: Callable[..., jax.Array], args: tuple[Any, ...]) -> np.ndarray:
    return np.asarray(jax.jit(lambda args: fn(*args))(args), np.float32)


def _tile_of(blocks: Blocks) -> dict[str, int]:
    return {name: getattr(blocks, name) for name in ("block_len", "num_warps", "num_stages")}


def _quickest(trials: Sequence[Trial]) -> Trial:
    return min(trials, key=lambda trial: np.inf if trial.seconds is None else trial.seconds)
