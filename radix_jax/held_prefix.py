"""Held prefixes: handles over KV that stays cached until they are released, for searches over continuations."""

import sys
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from radix_jax.cache import HandleError, PrefixCache, PrefixHandle, TailHandle, of_weights
from radix_jax.intake import TokenIds, checked_ids
from radix_jax.request import CompletionOutput, RequestOutput, SamplingParams
from radix_jax.scheduler import NoRoom

_MAX_NAMED = 8
_MOST_IDS = 2**31
_OWN_FRAMES = ("radix_jax", "jaxtyping", "beartype")
_JUST_COMPUTE = SamplingParams(temperature=0.0, max_tokens=1)


@runtime_checkable
class Serves(Protocol):
    """What is asked of an engine."""

    @property
    def cache(self) -> PrefixCache:
        """As `Engine.cache`."""
        ...

    @property
    def weight_version(self) -> int:
        """As `Engine.weight_version`."""
        ...

    def prefix(self, token_ids: TokenIds, *, namespace: Hashable = None) -> "HeldPrefix":
        """As `Engine.prefix`."""
        ...

    def stream(
        self, token_ids: TokenIds, sampling: SamplingParams | None = None, *, namespace: Hashable = None
    ) -> Generator[RequestOutput, None, None]:
        """As `Engine.stream`."""
        ...


class _Lease:
    """What one handle has locked. where: file and line that asked for it. end: why it can't be used any more."""

    def __init__(
        self,
        token_ids: Int32[np.ndarray, " T"],
        namespace: Hashable,
        cached_len: int,
        locks: Sequence[PrefixHandle | TailHandle],
    ) -> None:
        self.token_ids = token_ids
        self.namespace = namespace
        self.cached_len = cached_len
        self.locks = tuple(locks)
        self.where = _caller()
        self.end: str | None = None

    def __str__(self) -> str:
        return f"{self.cached_len} tokens held by {self.where}"


class HeldPrefix:
    """A prefix whose KV stays cached until `release`, or the end of a `with`. A value: nothing changes its ids.

    All but the last id are held: that one is computed by whoever asks what comes next, and is cached then like all that
    was computed. Without partial pages whole pages alone are held. One that is dropped unreleased is told of in a
    ResourceWarning, and given back at the engine's next step. Make them with `Engine.prefix`.

    After new weights, a step that failed, and when the engine is closed, a handle is dead: all but `release`,
    `token_ids` and `cached_len` raise HandleError then, as after its release.
    """

    def __init__(self, held: "HeldPrefixes", lease: _Lease) -> None:
        self._held = held
        self._lease = lease

    @property
    def token_ids(self) -> Int32[np.ndarray, " T"]:
        """All ids of the prefix, read-only."""
        return self._lease.token_ids

    @property
    def namespace(self) -> Hashable:
        """KV is shared inside one namespace alone."""
        return self._lease.namespace

    @property
    def cached_len(self) -> int:
        """How many of the ids have their KV held; only what is behind them is computed by `sample` and `extend`."""
        return self._lease.cached_len

    def extend(self, token_ids: TokenIds) -> "HeldPrefix":
        """Another handle, of these ids and `token_ids` behind them; this one stays as it is. Raises as `Engine.prefix`.

        Raises:
            HandleError: the handle was released or is dead. ValueError: no ids.
        """
        self._check_alive()
        if not len(token_ids):
            raise ValueError("nothing to extend by; fork(1) gives another handle of the same ids")
        more = checked_ids(token_ids, _MOST_IDS, _MOST_IDS)  # the engine checks them all by its own limits
        return self._held.engine.prefix(np.concatenate([self.token_ids, more]), namespace=self.namespace)

    def fork(self, num_handles: int) -> "list[HeldPrefix]":
        """So many more handles of the same ids, each to be released by itself; nothing is computed.

        Raises:
            HandleError: the handle was released or is dead. ValueError: a negative number.
        """
        self._check_alive()
        if num_handles < 0:
            raise ValueError(f"num_handles={num_handles} is negative")
        return [self._held.fork(self._lease) for _ in range(num_handles)]

    def sample(self, sampling: SamplingParams | None = None) -> list[CompletionOutput]:
        """`sampling.n` continuations, by index, as `Engine.stream` ends with them: ids and, where asked for,
        log-probabilities. Of the prefix only what is behind `cached_len` is computed. Raises as `Engine.stream`.

        Raises:
            HandleError: the handle was released or is dead.
        """
        self._check_alive()
        return self._held.run(self.token_ids, sampling, self.namespace).outputs

    def release(self) -> None:
        """Let the KV be evicted, as far as nobody else holds it. Does nothing the second time."""
        self._held.end(self._lease, "it was released")

    def __enter__(self) -> "HeldPrefix":
        self._check_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = f"{self.cached_len} held" if self._lease.end is None else self._lease.end
        return f"HeldPrefix({len(self.token_ids)} tokens, {state})"

    def _check_alive(self) -> None:
        if self._lease.end is not None:
            raise HandleError(f"this handle can't be used: {self._lease.end}; make another with Engine.prefix")


class HeldPrefixes:
    """The handles of an engine that are not released yet.

    shares: whether the engine has a prefix cache.
    """

    def __init__(self, engine: Serves, *, shares: bool) -> None:
        self.engine = engine
        self._shares = shares
        self._leases: dict[_Lease, None] = {}
        # Of handles that were collected. The collector may come in the midst of anything, so they are ended later.
        self._lost: deque[_Lease] = deque()

    def hold(self, token_ids: Int32[np.ndarray, " T"], namespace: Hashable) -> HeldPrefix:
        """A handle over checked ids, after computing what the cache lacks. Raises as `Engine.prefix`."""
        if not self._shares:
            raise ValueError("enable_prefix_cache=False: this engine holds no prefixes; make one with the cache on")
        self._end_lost()
        cache = self.engine.cache
        wanted_len = len(token_ids) - 1
        if not cache.tree.partial_pages:
            wanted_len -= wanted_len % cache.page_size
        cached_len, locks = self._lock(token_ids[:wanted_len], namespace)
        if cached_len < wanted_len:
            _unlock(cache, locks)
            output = self.run(token_ids[:wanted_len], _JUST_COMPUTE, namespace)
            if output.outputs[0].finish_reason == "abort":
                raise RuntimeError(f"computing the prefix was ended: {output.outputs[0].stop_reason or 'aborted'}")
            cached_len, locks = self._lock(token_ids[:wanted_len], namespace)
        ids = token_ids.copy()
        ids.flags.writeable = False
        return self._handle(_Lease(ids, namespace, cached_len, locks))

    def fork(self, lease: _Lease) -> HeldPrefix:
        """Another handle over what a lease holds."""
        for lock in lease.locks:
            self.engine.cache.lock(lock)
        return self._handle(_Lease(lease.token_ids, lease.namespace, lease.cached_len, lease.locks))

    def run(
        self, token_ids: Int32[np.ndarray, " T"], sampling: SamplingParams | None, namespace: Hashable
    ) -> RequestOutput:
        """The last output of a request."""
        [output] = deque(self.engine.stream(token_ids, sampling, namespace=namespace), maxlen=1)
        return output

    def end(self, lease: _Lease, reason: str, *, unlock: bool = True) -> None:
        """Make a handle useless, for this reason; the first one counts."""
        if lease.end is None:
            lease.end = reason
            del self._leases[lease]
            if unlock:
                _unlock(self.engine.cache, lease.locks)

    def end_all(self, reason: str, *, unlock: bool) -> None:
        """Make all handles useless: the KV that they hold is of no use any more. unlock: the cache is still in use."""
        for lease in list(self._leases):
            self.end(lease, reason, unlock=unlock)

    def close(self) -> None:
        """The engine is closed."""
        self._end_lost()
        if self._leases:
            warnings.warn(f"the engine was closed while {self._told()}", ResourceWarning, stacklevel=3)
        self.end_all("the engine was closed", unlock=True)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Where a step finds no room inside, the error names what is held."""
        self._end_lost()
        try:
            yield
        except NoRoom as error:
            if self._leases:
                raise NoRoom(f"{error}; {self._told()}; release what is not needed") from error
            raise

    def check_none(self) -> None:
        """Raise RuntimeError if anything is held."""
        self._end_lost()
        if self._leases:
            raise RuntimeError(f"{self._told()}; release them before the cache is flushed")

    def check_integrity(self) -> None:
        """Raise AssertionError unless all that is held is locked as often as it is held, and found in the cache."""
        self._end_lost()
        counts = Counter(lock for lease in self._leases for lock in lease.locks)
        for lock, count in counts.items():
            if lock.num_locks != count:
                raise AssertionError(f"{count} held prefixes share a lock that was taken {lock.num_locks} times")
        for lease in self._leases:
            whole_len = lease.cached_len - lease.cached_len % self.engine.cache.page_size
            found_len = self.engine.cache.match_len(lease.token_ids, self._in_cache(lease.namespace))
            if found_len < whole_len:
                raise AssertionError(f"{lease}, and the cache has {found_len} of them")

    def _lock(
        self, token_ids: Int32[np.ndarray, " T"], namespace: Hashable
    ) -> tuple[int, Sequence[PrefixHandle | TailHandle]]:
        return self.engine.cache.hold(token_ids, self._in_cache(namespace))

    def _in_cache(self, namespace: Hashable) -> Hashable:
        """The caller's namespace, under the weights of now."""
        return of_weights(namespace, self.engine.weight_version)

    def _handle(self, lease: _Lease) -> HeldPrefix:
        self._leases[lease] = None
        handle = HeldPrefix(self, lease)
        weakref.finalize(handle, _note_lost, lease, self._lost).atexit = False
        return handle

    def _end_lost(self) -> None:
        while self._lost:
            self.end(self._lost.popleft(), "it was dropped unreleased")

    def _told(self) -> str:
        leases = list(self._leases)
        more = f" and {len(leases) - _MAX_NAMED} more" if len(leases) > _MAX_NAMED else ""
        return f"{len(leases)} prefixes are held: {', '.join(map(str, leases[:_MAX_NAMED]))}{more}"


def _unlock(cache: PrefixCache, locks: Sequence[PrefixHandle | TailHandle]) -> None:
    for lock in locks:
        cache.unlock(lock)


def _note_lost(lease: _Lease, lost: deque[_Lease]) -> None:
    """A handle was collected."""
    if lease.end is None:
        lost.append(lease)
        warnings.warn(f"a handle was dropped unreleased: {lease}; release it, or use a with", ResourceWarning, 2)


def _caller() -> str:
    """File and line of the innermost call from outside the package, and of what may wrap its functions."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN_FRAMES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
