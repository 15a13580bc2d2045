"""Outputs: what callers get to see of the states of their requests."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radix_jax.request import CompletionOutput, RequestOutput
from radix_jax.scheduler import RequestState


def completion_of(state: RequestState) -> CompletionOutput:
    """One sample as it stands."""
    logprobs = state.logprobs
    return CompletionOutput(
        index=state.request.sample_index,
        token_ids=state.output_ids.tolist(),
        finish_reason=state.finish_reason,
        stop_reason=state.stop_reason,
        logprobs=None if logprobs is None else list(logprobs.by_token),
        cumulative_logprob=None if logprobs is None else logprobs.total,
        version_starts=state.version_starts,
        sampling_logprobs=None if logprobs is None else list(logprobs.sampling),
    )


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request as a caller sees it. prompt: the list that all its outputs carry. states: its samples, by index."""

    request_id: str
    prompt: list[int]
    states: Sequence[RequestState]


class Outputs:
    """The unfinished requests of an engine, and their RequestOutputs. A request bears the id of its first sample."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}
        self._of_sample: dict[str, _Asked] = {}
        self._streams: dict[str, deque[RequestOutput]] = {}  # what a stream has yet to give, whoever made the step
        self._kept: dict[str, RequestOutput] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._asked

    @property
    def request_ids(self) -> frozenset[str]:
        """Of the requests of which a sample is unfinished."""
        return frozenset(self._asked)

    def begin(self, states: Sequence[RequestState]) -> str:
        """A request came, with these samples; returns its id."""
        request = states[0].request
        asked = _Asked(request.request_id, request.token_ids.tolist(), states)
        self._asked[asked.request_id] = asked
        self._of_sample |= {state.request_id: asked for state in states}
        return asked.request_id

    def states(self, request_id: str) -> Sequence[RequestState]:
        """The samples of a request, ended ones included; none for an id that no unfinished request has."""
        asked = self._asked.get(request_id)
        return () if asked is None else asked.states

    def of(self, changed: Iterable[RequestState]) -> list[RequestOutput]:
        """A state of each request of which a sample changed, with all its samples. What is finished is forgotten."""
        together = dict.fromkeys([self._of_sample[state.request_id] for state in changed])
        outputs = [self._output(asked) for asked in together]
        for output in outputs:
            if output.request_id in self._streams:
                self._streams[output.request_id].append(output)
        return outputs

    @property
    def num_kept(self) -> int:
        """Outputs that `take_kept` would give."""
        return len(self._kept)

    def keep(self, outputs: Sequence[RequestOutput]) -> None:
        """Outputs that came outside a step, for the next step to return; a later one of a request takes the place of
        the one before."""
        self._kept |= {output.request_id: output for output in outputs}

    def take_kept(self) -> list[RequestOutput]:
        """What was kept, once."""
        kept, self._kept = self._kept, {}
        return list(kept.values())

    def forget_kept(self, request_id: str) -> None:
        """A later output of this request was given out."""
        self._kept.pop(request_id, None)

    def open_stream(self, request_id: str) -> deque[RequestOutput]:
        """Where the coming outputs of a request are put, besides being returned, until `close_stream`."""
        outputs = self._streams[request_id] = deque()
        return outputs

    def close_stream(self, request_id: str) -> None:
        """Nobody reads them any more; also for a stream that was never opened."""
        self._streams.pop(request_id, None)

    def clear(self) -> None:
        """All requests were dropped; streams keep what they have yet to give."""
        self._asked.clear()
        self._of_sample.clear()
        self._kept.clear()

    def _output(self, asked: _Asked) -> RequestOutput:
        first = asked.states[0]
        entries = first.prompt_logprobs
        finished = not first.group.num_unfinished
        if finished:
            del self._asked[asked.request_id]
            for state in asked.states:
                del self._of_sample[state.request_id]
        return RequestOutput(
            request_id=asked.request_id,
            prompt_token_ids=asked.prompt,
            cached_tokens=first.cached_len,
            outputs=[completion_of(state) for state in asked.states],
            finished=finished,
            prompt_logprobs=entries.by_token() if entries is not None and entries.is_complete else None,
        )
