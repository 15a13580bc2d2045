"""A seeded trace of conversations, as a prefix cache sees it: what it is asked, in which order, with how much room.

System prompts are drawn by Zipf's law, conversations have a geometric number of turns, each turn continues all that was
said before, and a fixed number of requests is in flight: the oldest ends when the next begins.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32


@dataclass(frozen=True)
class TraceShape:
    """What a trace is drawn from. Lengths are in tokens, ranges are half open.

    zipf: exponent over the system prompts. mean_turns: of a conversation. num_open: conversations that go on at a time,
    so that a conversation's next turn comes after about so many requests. num_in_flight: requests between their start
    and their end.
    """

    num_requests: int = 4000
    num_system_prompts: int = 64
    zipf: float = 1.1
    mean_turns: float = 4.0
    num_open: int = 128
    num_in_flight: int = 32
    system_len: tuple[int, int] = (256, 2048)
    user_len: tuple[int, int] = (32, 256)
    output_len: tuple[int, int] = (64, 384)
    vocab_size: int = 50000
    seed: int = 0


@dataclass(frozen=True)
class TraceRequest:
    """ids: prompt and output. prompt_len: tokens of the prompt."""

    ids: Int32[np.ndarray, " T"]
    prompt_len: int


@dataclass(frozen=True)
class Trace:
    """requests: by number. steps: what happens in turn; i >= 0: request i starts, ~i: request i ends."""

    requests: Sequence[TraceRequest]
    steps: Sequence[int]


def make_trace(shape: TraceShape) -> Trace:
    """Draw a trace; the same shape gives the same trace."""
    rng = np.random.default_rng(shape.seed)
    systems = [_draw(rng, shape, shape.system_len) for _ in range(shape.num_system_prompts)]
    weights = np.arange(1, shape.num_system_prompts + 1) ** -shape.zipf
    weights /= weights.sum()
    requests: list[TraceRequest] = []
    steps: list[int] = []
    in_flight: deque[int] = deque()
    waiting: list[Int32[np.ndarray, " T"]] = []  # what was said so far, of conversations whose next turn may come
    for number in range(shape.num_requests):
        if len(in_flight) == shape.num_in_flight:
            ended = in_flight.popleft()
            steps.append(~ended)
            if rng.random() >= 1 / shape.mean_turns:
                waiting.append(requests[ended].ids)
        if waiting and len(waiting) + len(in_flight) >= shape.num_open:
            said = waiting.pop(int(rng.integers(len(waiting))))
        else:
            said = systems[rng.choice(len(systems), p=weights)]
        prompt = np.concatenate([said, _draw(rng, shape, shape.user_len)])
        ids = np.concatenate([prompt, _draw(rng, shape, shape.output_len)])
        requests.append(TraceRequest(ids, len(prompt)))
        steps.append(number)
        in_flight.append(number)
    steps += [~number for number in in_flight]
    return Trace(requests, steps)


def _draw(rng: np.random.Generator, shape: TraceShape, lengths: tuple[int, int]) -> Int32[np.ndarray, " T"]:
    return rng.integers(shape.vocab_size, size=int(rng.integers(*lengths)), dtype=np.int32)
