"""run_all: several prompts through an engine, to their ends."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from radix_jax.request import FinishCheck, RequestOutput, SamplingParams
from radix_jax.scheduler import QueueFull


@runtime_checkable
class Serves(Protocol):
    """What of an Engine is used."""

    @property
    def unfinished(self) -> frozenset[str]:
        """Ids of the requests that wait or run."""
        ...

    def add_request(
        self,
        token_ids: Any,
        sampling: SamplingParams | None = None,
        *,
        finish_check: FinishCheck | None = None,
        namespace: Hashable = None,
        cache: str = "use",
    ) -> str:
        """Queue a request."""
        ...

    def step(self) -> list[RequestOutput]:
        """Finish a step."""
        ...

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request."""
        ...


def run_all(
    engine: Serves,
    prompts: Sequence[Any],
    samplings: Sequence[SamplingParams],
    *,
    finish_checks: Sequence[FinishCheck | None] = (),
    namespace: Hashable = None,
) -> list[RequestOutput]:
    """The last output of each prompt, in their order. One that is refused refuses all: none is left behind.

    samplings: one each. finish_checks: one each, or none.

    Raises:
        TypeError, ValueError: as `Engine.add_request`, and which prompt.
        RuntimeError: a step failed, and the requests were dropped.
    """
    before = engine.unfinished
    places: dict[str, int] = {}
    done: dict[str, RequestOutput] = {}

    def step() -> None:
        done.update({output.request_id: output for output in engine.step() if output.finished})

    try:
        checks = finish_checks or [None] * len(prompts)
        for place, (prompt, sampling, check) in enumerate(zip(prompts, samplings, checks, strict=True)):
            request_id = None
            while request_id is None:
                try:
                    request_id = engine.add_request(prompt, sampling, finish_check=check, namespace=namespace)
                except QueueFull:
                    step()
                except (TypeError, ValueError) as error:
                    raise type(error)(f"prompt {place}: {error}") from error
            places[request_id] = place
        while not places.keys() <= done.keys():
            step()
    except BaseException:
        # Not by `places`: an interrupt may come before an id is entered there.
        for request_id in engine.unfinished - before:
            engine.abort(request_id)
        raise
    return [done[request_id] for request_id in places]
