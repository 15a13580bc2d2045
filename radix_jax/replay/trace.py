"""Traces: which requests come when, with token ids that are made when they are asked for.

A trace of an hour has some 10^8 prompt tokens, so a request keeps what its ids are made from, and no more.
"""

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

HASH_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

FIRST_OUTPUT_ID = 1 << 30
"""Made-up ids of outputs start here, those of prompts end below."""

MAX_HASH_ID = FIRST_OUTPUT_ID // HASH_TOKENS - 1


@runtime_checkable
class PromptIds(Protocol):
    """Where the token ids of a prompt come from."""

    def make(self, prompt_len: int) -> Int32[np.ndarray, " T"]:
        """The first `prompt_len` token ids."""
        ...


@dataclass(frozen=True, eq=False)
class HashedIds:
    """Ids h * 512, h * 512 + 1, ... for each hash id h, so that equal hash ids are equal tokens and no others are."""

    hash_ids: Int32[np.ndarray, " H"]

    def make(self, prompt_len: int) -> Int32[np.ndarray, " T"]:
        """The first `prompt_len` token ids."""
        ids = self.hash_ids[:, None] * np.int32(HASH_TOKENS) + np.arange(HASH_TOKENS, dtype=np.int32)
        return ids.reshape(-1)[:prompt_len]


@dataclass(frozen=True)
class FreshIds:
    """Ids that count up from `first`, which no other prompt has."""

    first: int

    def make(self, prompt_len: int) -> Int32[np.ndarray, " T"]:
        """The first `prompt_len` token ids."""
        return np.arange(self.first, self.first + prompt_len, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class GivenIds:
    """Ids as they were recorded."""

    token_ids: Int32[np.ndarray, " T"]

    def make(self, prompt_len: int) -> Int32[np.ndarray, " T"]:
        """The first `prompt_len` token ids."""
        return self.token_ids[:prompt_len]


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    arrival_s: seconds since the trace began. output_len: tokens that it generates, at least 1.
    output: ids of the output where they were recorded; None makes up ids that nobody else has.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    prompt: PromptIds = field(repr=False)
    output: PromptIds | None = field(default=None, repr=False)
    namespace: Hashable = None
    priority: int = 0

    def prompt_ids(self) -> Int32[np.ndarray, " T"]:
        """Token ids of the prompt, made anew at each call."""
        return self.prompt.make(self.prompt_len)


class Trace(Sequence[TraceRequest]):
    """Requests in order of arrival.

    Raises:
        ValueError: an arrival before the one in front of it, or never; or more output tokens than there are ids for.
    """

    def __init__(self, name: str, requests: Sequence[TraceRequest]) -> None:
        for place, (one, following) in enumerate(itertools.pairwise(requests)):
            if following.arrival_s < one.arrival_s:
                raise ValueError(
                    f"request {place + 1} of {name} arrives at {following.arrival_s} s, the one before it at "
                    f"{one.arrival_s} s; sort them by arrival"
                )
        never = next((place for place, one in enumerate(requests) if not math.isfinite(one.arrival_s)), None)
        if never is not None:
            raise ValueError(f"request {never} of {name} arrives at {requests[never].arrival_s} s, which never comes")
        num_outputs = sum(request.output_len for request in requests)
        if num_outputs > FIRST_OUTPUT_ID:
            raise ValueError(
                f"{name} has {num_outputs} output tokens, there are ids for {FIRST_OUTPUT_ID}; leave requests out"
            )
        self._name = name
        self._requests = list(requests)
        output_lens = np.array([request.output_len for request in self._requests], np.int64)
        self._first_output_ids = FIRST_OUTPUT_ID + np.cumsum(output_lens) - output_lens

    @property
    def name(self) -> str:
        """What the trace is called in reports."""
        return self._name

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        """A request, or a list of them for a slice."""
        return self._requests[place]

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)

    def output_ids(self, place: int) -> Int32[np.ndarray, " N"]:
        """Token ids that request `place` generates: the recorded ones, or made-up ones that no other request has."""
        request = self._requests[place]
        source = request.output or FreshIds(int(self._first_output_ids[place]))
        return source.make(request.output_len)

    def head(self, num_requests: int) -> "Trace":
        """The first `num_requests` requests."""
        return Trace(self._name, self._requests[:num_requests])

    def shifted(self, offset_s: float) -> "Trace":
        """The same requests, arriving `offset_s` later."""
        return Trace(self._name, [replace(one, arrival_s=one.arrival_s + offset_s) for one in self._requests])

    def sped_up(self, factor: float) -> "Trace":
        """The same requests, arriving `factor` times as fast.

        Raises:
            ValueError: the factor is not above 0.
        """
        if not factor > 0:
            raise ValueError(f"speed={factor} is not above 0")
        return Trace(self._name, [replace(one, arrival_s=one.arrival_s / factor) for one in self._requests])

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.prompt_len for request in self._requests)

    @property
    def max_len(self) -> int:
        """Longest prompt + output, 0 for an empty trace."""
        return max((request.prompt_len + request.output_len for request in self._requests), default=0)
