"""Traces from files: Mooncake's JSONL, recordings of our own engine, Azure's CSV."""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from radix_jax.config import check_int
from radix_jax.replay.trace import (
    FIRST_OUTPUT_ID,
    HASH_TOKENS,
    MAX_HASH_ID,
    FreshIds,
    GivenIds,
    HashedIds,
    Trace,
    TraceRequest,
)
from radix_jax.request import RecordedRequest

_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MAX_SHOWN = 80
_MAX_MS = sys.float_info.max  # which leaves out infinity, and ints that no float can hold


def read_trace(path: str | Path, limit: int | None = None) -> Trace:
    """A trace from a file, the form told by its first line; arrivals count from the first request's.

    - Mooncake: JSON lines with timestamp (ms), input_length, output_length and hash_ids, one for each 512 tokens of the
      prompt, the last one partly filled.
    - Recording: JSON lines as `RecordedRequest` writes them, in any order: an engine writes a request when it ends. One
      without output counts as one of one token.
    - Azure: CSV with TIMESTAMP, ContextTokens and GeneratedTokens. It tells nothing of prefixes: no two prompts share a
      token.

    limit: of the requests in order of arrival, so many at most.

    Raises:
        OSError: the file can't be read.
        ValueError: a line is of no known form, or wrong; with its number and the reason.
    """
    path = Path(path)
    try:
        lines = enumerate(path.read_text("utf-8").splitlines(), 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from error
    kept = ((number, line) for number, line in lines if line.strip())
    first = next(kept, None)
    if first is None:
        raise ValueError(f"{path} is empty")
    if first[1].lstrip("\ufeff").split(",")[0].strip() == _AZURE_FIELDS[0]:
        requests = _parse_all(path, kept, _AzureLines(first[1].lstrip("\ufeff")), limit)
    elif '"token_ids"' in first[1]:
        recorded = _parse_all(path, _with_first(first, kept), _recorded, None, is_sorted=False)
        requests = sorted(recorded, key=lambda request: request.arrival_s)[:limit]
    else:
        requests = _parse_all(path, _with_first(first, kept), _mooncake, limit)
    if not requests:
        raise ValueError(f"{path} has no request")
    began_s = requests[0].arrival_s
    return Trace(path.name, requests).shifted(-began_s)


def _with_first(first: tuple[int, str], rest: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _parse_all(
    path: Path,
    lines: Iterable[tuple[int, str]],
    parse: Callable[[str], TraceRequest],
    limit: int | None,
    *,
    is_sorted: bool = True,
) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    for number, line in lines:
        if limit is not None and len(requests) == limit:
            break
        try:
            request = parse(line)
            if is_sorted and requests and request.arrival_s < requests[-1].arrival_s:
                raise ValueError("it arrives before the request in front of it; sort the trace by time")
        except (ValueError, RecursionError) as error:
            reason = "it is no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
            reason = "it is nested too deep" if isinstance(error, RecursionError) else reason
            shown = line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."
            raise ValueError(f"{path}, line {number}: {reason}: {shown}") from error
        requests.append(request)
    return requests


def _mooncake(line: str) -> TraceRequest:
    fields = json.loads(line)
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    if not isinstance(fields, dict) or not fields.keys() >= set(names):
        raise ValueError(f"a request of Mooncake's form has the fields {', '.join(names)}")
    timestamp, hash_ids = fields["timestamp"], fields["hash_ids"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp <= _MAX_MS:
        raise ValueError(f"timestamp={timestamp!r} is no number of milliseconds")
    check_int("input_length", fields["input_length"], at_least=1)
    check_int("output_length", fields["output_length"], at_least=1)
    num_hashes = -(-fields["input_length"] // HASH_TOKENS)
    if not isinstance(hash_ids, list) or len(hash_ids) != num_hashes:
        raise ValueError(f"input_length={fields['input_length']} takes {num_hashes} hash_ids of {HASH_TOKENS} tokens")
    for hash_id in hash_ids:
        check_int("hash_ids entry", hash_id, at_least=0)
    if max(hash_ids) > MAX_HASH_ID:
        raise ValueError(f"hash_ids entry {max(hash_ids)} is above {MAX_HASH_ID}, the largest that token ids are for")
    return TraceRequest(
        arrival_s=timestamp / 1000,
        prompt_len=fields["input_length"],
        output_len=fields["output_length"],
        prompt=HashedIds(np.array(hash_ids, np.int32)),
    )


def _recorded(line: str) -> TraceRequest:
    record = RecordedRequest.from_json(line)
    return TraceRequest(
        arrival_s=record.arrival_s,
        prompt_len=len(record.token_ids),
        output_len=max(1, len(record.output_ids)),
        prompt=GivenIds(record.token_ids),
        output=GivenIds(record.output_ids) if len(record.output_ids) else None,
        namespace=record.namespace,
        priority=record.priority,
    )


class _AzureLines:
    """Parses the lines after the header; prompts take their ids one after the other."""

    def __init__(self, header: str) -> None:
        names = tuple(name.strip() for name in header.split(","))
        if names != _AZURE_FIELDS:
            raise ValueError(f"the header {header!r} is not {','.join(_AZURE_FIELDS)}")
        self._next_id = 0

    def __call__(self, line: str) -> TraceRequest:
        values = next(csv.reader([line]))
        if len(values) != len(_AZURE_FIELDS):
            raise ValueError(f"it has {len(values)} fields, not {', '.join(_AZURE_FIELDS)}")
        # Its times have seven decimals, one more than `datetime` reads.
        arrival_s = datetime.fromisoformat(values[0].strip()[:26]).timestamp()
        prompt_len, output_len = int(values[1]), int(values[2])
        check_int("ContextTokens", prompt_len, at_least=1)
        check_int("GeneratedTokens", output_len, at_least=1)
        if self._next_id + prompt_len > FIRST_OUTPUT_ID:
            raise ValueError(f"prompts of more than {FIRST_OUTPUT_ID} tokens together have no ids of their own")
        prompt = FreshIds(self._next_id)
        self._next_id += prompt_len
        return TraceRequest(arrival_s, prompt_len, output_len, prompt)
