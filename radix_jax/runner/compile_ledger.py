"""What was compiled, why, and how long it took; and where compiles are kept between processes."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import jax

from radix_jax.cache_dir import user_cache_dir
from radix_jax.plan import Bucket

_LOG = logging.getLogger("radix_jax")
CompileReason = Literal["warmup", "first use"]
T = TypeVar("T")


@dataclass(frozen=True)
class CompileRecord:
    """One compile: the bucket, why, and the seconds it took (a fetch from the persistent cache included)."""

    bucket: Bucket
    reason: CompileReason
    seconds_s: float


@dataclass
class CompileLedger:
    """Every compile of a runner, in order."""

    records: list[CompileRecord] = field(default_factory=list)

    def timed(self, bucket: Bucket, reason: CompileReason, compile_step: Callable[[], T]) -> T:
        """Run `compile_step` and enter it."""
        _LOG.info("compiling %s (%s)", bucket, reason)
        start = time.perf_counter()
        compiled = compile_step()
        seconds_s = time.perf_counter() - start
        self.records.append(CompileRecord(bucket, reason, seconds_s))
        _LOG.info("compiled in %.1f s", seconds_s)
        return compiled

    @property
    def total_s(self) -> float:
        """Seconds spent in all compiles."""
        return sum(record.seconds_s for record in self.records)


def keep_compiles(folder: Path) -> None:
    """Use `folder` as XLA's persistent compile cache, unless the program has set one already.

    The setting is JAX's own and lasts for the process.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def keep_engine_compiles(folder: str | None) -> None:
    """`keep_compiles` as EngineConfig.compile_cache_dir says: "" keeps none, None takes the user's cache folder where
    that can be written."""
    if folder:
        keep_compiles(Path(folder))
    elif folder is None:
        try:
            keep_compiles(user_cache_dir() / "xla")
        except (OSError, RuntimeError) as error:
            _LOG.warning("compiles are not kept: %s; set compile_cache_dir, or RADIX_JAX_CACHE", error)
