"""NewWeights: what becomes of the unfinished requests when the weights change under them."""

from collections.abc import Sequence
from typing import Literal, get_args

from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.scheduler.prefill import Prefill
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.running import RunningBatch
from radix_jax.scheduler.stats import SchedulerStats
from radix_jax.scheduler.timeline import Timelines
from radix_jax.scheduler.unfinished import Unfinished
from radix_jax.scheduler.waiting import WaitingQueue

OnUpdate = Literal["continue", "restart", "abort"]


def check_on_update(on_update: object) -> None:
    """Refuse what is no way to go on.

    Raises:
        ValueError: names the three that are.
    """
    if on_update not in get_args(OnUpdate):
        raise ValueError(f"on_update={on_update!r} is none of {', '.join(map(repr, get_args(OnUpdate)))}")


class NewWeights:
    """Puts the unfinished requests under new weights. Nothing may be in flight.

    What waits is computed by the new weights and shares with what they compute. A running request that goes on has KV
    of the old ones: it shares nothing from there on, and what it shared before is dropped with its last user.
    """

    def __init__(
        self,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: RunningBatch,
        prefill: Prefill,
        unfinished: Unfinished,
        timelines: Timelines,
    ):
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._prefill = prefill
        self._unfinished = unfinished
        self._timelines = timelines

    def check(self, on_update: OnUpdate) -> None:
        """Refuse to take back output that somebody was told of, or will be by the step in flight.

        Raises:
            RuntimeError: "restart", and a request that began has a finish_check.
        """
        if on_update != "restart":
            return
        for state in self._begun():
            num_told = state.num_outputs + state.num_pending
            if state.request.finish_check is not None and num_told:
                raise RuntimeError(
                    f"on_update='restart' drops the output of request {state.request_id}, and its finish_check can't "
                    f"be untold the {num_told} ids of it; finish or abort that request first, or use 'continue' or "
                    "'abort'"
                )

    def apply(self, version: int, on_update: OnUpdate, stats: SchedulerStats) -> list[RequestState]:
        """The weights have this version from here on. Returns the samples that were ended for it.

        Raises:
            Exception: what a schedule policy of one's own raises; the scheduler is of no use then.
        """
        ended: list[RequestState] = []
        if on_update == "abort":
            ended = self._with_siblings(self._begun())
            for state in ended:
                self._unfinished.abort(state, f"weights updated to version {version}", stats)
        restarted = self._begun() if on_update == "restart" else []
        for state in restarted:
            self._take_back(state)
        for state in self._running:
            state.shares = False
        self._unfinished.weight_version = version
        for state in self._unfinished.states.values():
            if self._running.get(state.request_id) is None:
                state.renew_sharing(version)
            state.note_version(version)
            self._timelines.note(state.request_id, "new weights", detail=f"version {version}")
        self._cache.retire()
        self._waiting.match_anew()
        for state in restarted:
            self._timelines.note(state.request_id, "restarted", detail=f"version {version}")
            self._waiting.add(state, ticket=state.ticket)
        self._prefill.retry()
        return ended

    def _begun(self) -> list[RequestState]:
        """Those that have KV or output of the weights of now."""
        return [
            state
            for state in self._unfinished.states.values()
            if state.num_outputs or self._running.get(state.request_id) is not None
        ]

    def _with_siblings(self, states: Sequence[RequestState]) -> list[RequestState]:
        """All unfinished samples of their requests."""
        groups = {id(state.group) for state in states}
        return [state for state in self._unfinished.states.values() if id(state.group) in groups]

    def _take_back(self, state: RequestState) -> None:
        """Take a request out, wherever it stands, without its output."""
        if state.request_id in self._waiting:
            self._waiting.remove(state.request_id)
        else:
            self._running.leave(state)
        state.drop_outputs()
