"""Streams: the states of one request as steps make them, whoever makes the steps."""

from collections.abc import Generator, Hashable
from typing import Any

from radix_jax.batch import Serves
from radix_jax.outputs import Outputs
from radix_jax.request import FinishCheck, SamplingParams


def stream_request(
    engine: Serves,
    all_outputs: Outputs,
    token_ids: Any,
    sampling: SamplingParams | None,
    finish_check: FinishCheck | None,
    namespace: Hashable,
    cache: str,
) -> Generator[Any, None, None]:
    """The states of one request, after one None: closing a generator that has not begun ends nothing.

    all_outputs: of the engine.
    """
    request_id = engine.add_request(token_ids, sampling, finish_check=finish_check, namespace=namespace, cache=cache)
    try:
        outputs = all_outputs.open_stream(request_id)
        yield None
        while True:
            while outputs:
                output = outputs.popleft()
                yield output
                if output.finished:
                    return
            if request_id not in all_outputs:
                raise RuntimeError(f"request {request_id} was dropped: a step failed, or the engine was closed")
            engine.step()
    finally:
        all_outputs.close_stream(request_id)
        engine.abort(request_id)
