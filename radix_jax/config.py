"""EngineConfig: every setting of an engine and its range. What hangs on the model is checked where it is known."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from radix_jax.attention_backends import backend_names

Warmup = Literal["lazy", "full"]
Dtype = Literal["float32", "bfloat16", "float16"]
# Tokens and rows of every step of a deterministic engine. XLA's matmuls on a CPU round a row alike at any place of one
# shape, from 64 rows on.
DETERMINISTIC_STEP_LEN = 64
KVDtype = Literal[Dtype, "float8_e4m3fn", "float8_e5m2"]

SCHEDULE_POLICIES = (
    "lpm",
    "fcfs",
    "dfs-weight",
    "hrrn",
    "shortest-prefill-first",
    "lof",
    "random",
    "routing-key",
    "priority",
)
EVICTION_POLICIES = (
    "lru",
    "lfu",
    "fifo",
    "filo",
    "mru",
    "priority",
    "slru",
    "tlru",
    "reuse-credit",
    "cost-aware",
    "reuse-rate",
)


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What a scheduler lets in, and how it mixes steps; the fields of the same names in EngineConfig.

    Raises:
        ValueError: a value out of its range, with the rule and the value.
    """

    max_running_requests: int
    max_prefill_tokens: int
    mixed_steps: bool = False
    max_consecutive_prefills: int = 8
    max_queued_requests: int | None = None
    queue_timeout_s: float | None = None
    run_timeout_s: float | None = None
    preemption_threshold: int | None = 1

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "max_prefill_tokens", "max_consecutive_prefills"):
            check_int(name, getattr(self, name), at_least=1)
        for name in ("max_queued_requests", "preemption_threshold"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        for name in ("queue_timeout_s", "run_timeout_s"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise ValueError(f"{name}={value!r} is not a number of seconds above 0")
        _check_bool("mixed_steps", self.mixed_steps)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. `None` means: chosen from the model and the machine, and logged.

    page_size: tokens a page.
    num_pages: pages of the pool, the null page 0 included; give this or `kv_memory_fraction`.
    kv_memory_fraction: share of the accelerator's free memory, after the weights, that the pool takes.
    max_model_len: longest prompt + output in tokens; None is the model's own (4,096 at most on CPU).
    max_running_requests: rows that decode together.
    max_prefill_tokens: tokens a prefill step computes; longer prompts are prefilled in chunks.
    mixed_steps: prefill steps carry the rows that decode, too, and count them among their tokens.
    max_consecutive_prefills: prefill steps in a row while others could decode; then a decode step.
    max_queued_requests: that may wait; more are refused. None: any number.
    queue_timeout_s, run_timeout_s: from arrival to the first step, and from there to the end; a request that takes
        longer ends with "abort". None: for ever.
    preemption_threshold: by how much a waiting request's priority must exceed a running one's to take its place; None:
        it never does.
    overlap: the next step is planned and sent before the tokens of the last one are read; same tokens either way.
    schedule_policy: who goes first of those that wait, of one priority: "lpm" (longest prefix match, with aging),
        "fcfs" or "priority" (by arrival), "dfs-weight" (depth first in the tree of prefixes, where most wait first),
        "hrrn" (highest response ratio), "shortest-prefill-first" (least work, with aging), "lof" (longest output),
        "random" (by `seed`) or "routing-key" (first what has the key of running requests);
        `radix_jax.scheduler.policy` has the exact rules and how long each lets anybody wait at most. In Python also a
        function of a QueueView: the smallest result first.
    eviction_policy: which unlocked leaf goes first: "lru" or "mru" (least or most recently used), "lfu" (least often),
        "fifo" or "filo" (by creation), "priority" (lowest), "slru" (what was reused twice last), "tlru" (first what a
        next turn can soon recompute), "reuse-credit" (age, less for what was reused), "cost-aware" (first what is
        cheap to recompute) or "reuse-rate" (what is reused least for the time it is kept, learned);
        `radix_jax.cache.eviction_rules.make_policy` has the exact rules. In Python also a function of a NodeView: the
        smallest result first.
    enable_prefix_cache: False computes every prompt in full.
    max_pinned_tokens: that `Engine.pin` may keep, what pins have in common counted once; None is half of the pool.
    dtype: of the weights; None is float32 on CPU, float16 on GPUs below compute capability 8.0 and bfloat16 on other
        accelerators.
    kv_dtype: of the pool; None is float32 on CPU and dtype on accelerators. A float8 pool holds K and V as they are,
        scaled by 1: half the bytes, and of a value's digits about one.
    attention_backend: "auto" picks by platform: "pallas_gpu" on a GPU of compute capability 8.0 and up,
        "pallas_tpu" on a TPU from v4 on, elsewhere "xla". "pallas_interpret" and "pallas_tpu_interpret" run those
        kernels on any machine, slowly, to prove them. In Python also a name that `register_attention_backend` was
        given.
    warmup: "full" compiles every bucket at start, "lazy" on first use.
    compile_cache_dir: folder of XLA's persistent compile cache; None is the user's cache folder, "" turns it off.
    seed: seeds the requests that bring no seed of their own, and the order of schedule_policy "random".
    partial_pages: a hit goes on into a cached page whose first tokens are the prompt's next, by a copy of that page;
        False shares whole pages alone.
    deterministic: a request gets the same tokens and bitwise the same log-probabilities whatever else runs, cached or
        not, in any chunks, retracted or not, at any page_size: every step has one shape, of 64 tokens in 64 rows. See
        docs/determinism.md for what it costs, and for what is promised without it.
    record: file to write each request to when it ends, for `radix-jax replay`; an older file is replaced.

    Raises:
        ValueError: a value out of its range, or two that don't go together, with the rule and the value.
    """

    page_size: int = 16
    num_pages: int | None = None
    kv_memory_fraction: float | None = None
    max_model_len: int | None = None
    max_running_requests: int = 64
    max_prefill_tokens: int = 2048
    mixed_steps: bool = SchedulerLimits.mixed_steps
    max_consecutive_prefills: int = SchedulerLimits.max_consecutive_prefills
    max_queued_requests: int | None = SchedulerLimits.max_queued_requests
    queue_timeout_s: float | None = SchedulerLimits.queue_timeout_s
    run_timeout_s: float | None = SchedulerLimits.run_timeout_s
    preemption_threshold: int | None = SchedulerLimits.preemption_threshold
    overlap: bool = True
    schedule_policy: str | Callable[..., Any] = "lpm"
    eviction_policy: str | Callable[..., Any] = "reuse-rate"
    enable_prefix_cache: bool = True
    max_pinned_tokens: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    attention_backend: str = "auto"
    warmup: str = "lazy"
    compile_cache_dir: str | None = None
    seed: int = 0
    partial_pages: bool = True
    deterministic: bool = False
    record: str | None = None

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, at_least=1)
        _ = self.limits
        check_int("seed", self.seed, at_least=0)
        if self.num_pages is not None:
            check_int("num_pages", self.num_pages, at_least=2)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, at_least=2)
        if self.max_pinned_tokens is not None:
            check_int("max_pinned_tokens", self.max_pinned_tokens, at_least=0)
        if self.kv_memory_fraction is not None:
            if self.num_pages is not None:
                raise ValueError("num_pages and kv_memory_fraction both size the pool; give one of them")
            if not isinstance(self.kv_memory_fraction, int | float) or not 0.0 < self.kv_memory_fraction <= 1.0:
                raise ValueError(f"kv_memory_fraction={self.kv_memory_fraction!r} is outside (0, 1]")
        for name in ("enable_prefix_cache", "partial_pages", "deterministic", "overlap"):
            _check_bool(name, getattr(self, name))
        _check_choice("dtype", self.dtype, (None, *get_args(Dtype)))
        _check_choice("kv_dtype", self.kv_dtype, (None, *get_args(KVDtype)))
        _check_choice("warmup", self.warmup, get_args(Warmup))
        if self.attention_backend not in backend_names():
            raise ValueError(
                f"attention_backend={self.attention_backend!r} is not one of {', '.join(map(repr, backend_names()))}; "
                "register_attention_backend makes it one"
            )
        if not callable(self.schedule_policy):
            _check_choice("schedule_policy", self.schedule_policy, SCHEDULE_POLICIES)
        if not callable(self.eviction_policy):
            _check_choice("eviction_policy", self.eviction_policy, EVICTION_POLICIES)
        if self.deterministic:
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        most = DETERMINISTIC_STEP_LEN
        if self.max_running_requests > most:
            raise ValueError(
                f"max_running_requests={self.max_running_requests}, and a step of deterministic=True has {most} rows; "
                "lower it"
            )
        if most % self.page_size:
            raise ValueError(
                f"page_size={self.page_size}, and deterministic=True cuts attention at multiples of whole pages that "
                f"must not hang on it; take a power of two up to {most}"
            )

    @property
    def limits(self) -> SchedulerLimits:
        """The scheduler's part of the settings; a deterministic engine's steps are short."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(SchedulerLimits)}
        limits = SchedulerLimits(**fields)
        if self.deterministic and limits.max_prefill_tokens > DETERMINISTIC_STEP_LEN:
            return dataclasses.replace(limits, max_prefill_tokens=DETERMINISTIC_STEP_LEN)
        return limits


ENGINE_FIELDS = tuple(field.name for field in dataclasses.fields(EngineConfig))


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Raise ValueError unless `value` is an int (not a bool) of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} is not an int")
    if value < at_least:
        raise ValueError(f"{name}={value} is below its least value {at_least}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a bool")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not one of {listed}")
