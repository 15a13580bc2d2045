"""Unfinished: the requests that wait or run. How they come, get their tokens, and end."""

import types
from collections.abc import Mapping, Sequence

from radix_jax.cache.keys import of_weights
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.request import Request
from radix_jax.scheduler.prefill import Prefill
from radix_jax.scheduler.request_state import RequestState, SampleGroup
from radix_jax.scheduler.running import RunningBatch
from radix_jax.scheduler.stats import SchedulerStats
from radix_jax.scheduler.timeline import Timelines
from radix_jax.scheduler.waiting import WaitingQueue


class Unfinished:
    """The samples of all requests that came and did not end yet.

    enable_prefix_cache: False takes every request for one of cache="off": KV is shared among its samples alone, and
        dropped when the last one ends.
    weight_version: that those who come now are computed by.
    """

    def __init__(
        self,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: RunningBatch,
        prefill: Prefill,
        timelines: Timelines,
        *,
        enable_prefix_cache: bool,
        weight_version: int,
    ):
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._prefill = prefill
        self._timelines = timelines
        self._enable_prefix_cache = enable_prefix_cache
        self._states: dict[str, RequestState] = {}
        self.weight_version = weight_version

    @property
    def states(self) -> Mapping[str, RequestState]:
        """Them by id; read-only."""
        return types.MappingProxyType(self._states)

    def add(self, requests: Sequence[Request], now: float, stats: SchedulerStats) -> list[RequestState]:
        """Queue the samples of one request: all of them or, where that raises, none.

        Raises:
            TypeError: as `WaitingQueue.add`, and what a rule of one's own raises.
        """
        group = self._new_group(requests)
        page_size, version = self._cache.page_size, self.weight_version
        states = [RequestState(request, page_size, now, group, version) for request in requests]
        queued: list[RequestState] = []
        try:
            for state in states:
                state.ticket = self._waiting.add(state, stats.num_prefill_tokens)
                queued.append(state)
        except Exception:
            for state in queued:
                self._waiting.remove(state.request_id)
            raise
        self._timelines.at(now)
        for state in states:
            self._states[state.request_id] = state
            self._timelines.begin(state.request_id, state.request.priority)
        self._prefill.retry()
        return states

    def append(self, state: RequestState, token_ids: list[int], stats: SchedulerStats) -> None:
        """Append tokens up to the sample's end. There, share the output too: its nodes begin at the prompt's last full
        page. The last token has no KV that anybody may count on."""
        stats.num_output_tokens += state.append_tokens(token_ids)
        if state.finish_reason is None:
            return
        self._running.share(state, state.num_tokens - 1)
        self._running.leave(state)
        if state.finish_reason == "abort":
            self._end(state, str(state.stop_reason))
            stats.num_aborted += 1
        else:
            self._end(state, state.finish_reason)
            stats.num_finished += 1

    def retract(self, state: RequestState, other: str | None, stats: SchedulerStats) -> None:
        """Take a running request's pages away, for the request `other` or since the pool is short; it waits again. What
        is computed of it stays in the tree for now, unless it is of old weights: the new ones compute it all again."""
        self._timelines.note(state.request_id, "retracted", detail=other)
        self._running.share(state, state.num_computed)
        self._running.leave(state)
        if state.weight_version != self.weight_version:
            state.renew_sharing(self.weight_version)
        state.num_retractions += 1
        stats.num_retractions += 1
        self._waiting.add(state, ticket=state.ticket)

    def abort(self, state: RequestState, limit: str | None, stats: SchedulerStats) -> None:
        """End a sample early; limit: the time-out or the new weights that did."""
        if state.request_id in self._waiting:
            self._waiting.remove(state.request_id)
        else:
            self._running.leave(state)
        state.finish_reason, state.stop_reason = "abort", limit
        self._end(state, limit or "abort")
        stats.num_aborted += 1

    def clear(self) -> None:
        """Forget all; their pages were given back."""
        for group in {state.group for state in self._states.values()}:
            self._drop_own(group)
        self._states.clear()
        self._timelines.end_all("dropped")
        self._prefill.retry()

    def _new_group(self, requests: Sequence[Request]) -> SampleGroup:
        mode = requests[0].cache if self._enable_prefix_cache else "off"
        return SampleGroup(requests[0].namespace, mode=mode, num_samples=len(requests))

    def _end(self, state: RequestState, reason: str) -> None:
        """Forget a sample that neither waits nor runs any more."""
        del self._states[state.request_id]
        self._prefill.retry()
        self._timelines.end(state.request_id, reason)
        state.group.num_unfinished -= 1
        if not state.group.num_unfinished:
            self._drop_own(state.group)

    def _drop_own(self, group: SampleGroup) -> None:
        """Drop what only its samples share; of earlier weights that is gone with its last user."""
        if group.is_private:
            self._cache.drop(of_weights(group.namespace, self.weight_version))
