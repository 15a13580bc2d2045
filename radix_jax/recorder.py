"""Recorder: requests as they happened, written to a file that a replay reads."""

import json
import logging
from collections.abc import Hashable, Sequence
from pathlib import Path

from radix_jax.request import RecordedRequest
from radix_jax.scheduler import RequestState

_LOG = logging.getLogger("radix_jax")


class Recorder:
    """Writes a line of JSON for each request when it ends: see `RecordedRequest`, and `replay.read_trace`. The samples
    of a request are recorded as requests that came together.

    The file is opened for each line and closed behind it, so that it is complete whatever happens to the process. Where
    that fails later on, an error is logged and nothing more is written; requests go on.

    path: an older file is replaced. start_s: the clock of `RequestState.queued_s` when the recording begins.

    Raises:
        ValueError: the file can't be written.
    """

    def __init__(self, path: str, start_s: float) -> None:
        self._path = Path(path).absolute()
        self._start_s = start_s
        self._unfinished: dict[str, RequestState] = {}
        self._failed = False
        try:
            self._path.write_text("")
        except OSError as error:
            raise ValueError(
                f"record={path!r} can't be written: {error.strerror}; give a file in a folder that exists and is yours"
            ) from error

    def check(self, namespace: Hashable) -> None:
        """Refuse a request that could not be recorded.

        Raises:
            TypeError: JSON has no form for its namespace.
        """
        try:
            json.dumps(namespace)
        except TypeError as error:
            raise TypeError(
                f"namespace {namespace!r} can't be recorded: {error}; use None, a bool, number or string, or a tuple "
                "of such, or leave `record` out"
            ) from error

    def begin(self, states: Sequence[RequestState]) -> None:
        """A request came, of these samples."""
        self._unfinished |= {state.request_id: state for state in states}

    def end(self, request_id: str) -> None:
        """A request ended, or was dropped."""
        state = self._unfinished.pop(request_id)
        request = state.request
        record = RecordedRequest(
            arrival_s=state.queued_s - self._start_s,
            token_ids=request.token_ids,
            output_ids=state.output_ids,
            max_tokens=request.max_tokens,
            namespace=request.namespace,
            priority=request.priority,
        )
        self._write(record.to_json() + "\n")

    def end_finished(self, states: Sequence[RequestState]) -> None:
        """Of these, record those that ended."""
        for state in states:
            if state.finish_reason is not None:
                self.end(state.request_id)

    def end_all(self) -> None:
        """All that is unfinished was dropped."""
        for request_id in list(self._unfinished):
            self.end(request_id)

    def _write(self, line: str) -> None:
        if self._failed:
            return
        try:
            with self._path.open("a") as file:
                file.write(line)
        except OSError as error:
            self._failed = True
            _LOG.error("the recording ends here: %s can't be written: %s", self._path, error.strerror)
