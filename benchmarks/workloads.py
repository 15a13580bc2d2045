"""Seeded workloads of token ids, for comparing engines: the same numbers for every engine.

A workload is a list of segment requests. The prompt of one is its parent's prompt, then (where `parent_gen`) what its
parent generated, then its own `ids`. Requests of wave w start when all of wave w - 1 have finished. Ids are drawn from
[1000, 40000), plain word pieces of the SmolLM2 vocabulary; no special ones.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SegmentRequest:
    """One request of a workload.

    id: its place in the workload. conv: conversation or tree that it belongs to.
    parent: id of the request that its prompt continues, None for a fresh prompt.
    parent_gen: the parent's generated ids are part of the prompt; else only the parent's prompt is.
    wave: it starts when every request of the wave before has finished.
    ids: token ids that it appends. max_new: tokens to generate, greedy, end-of-sequence ignored.
    """

    id: int
    conv: int
    parent: int | None
    parent_gen: bool
    wave: int
    ids: tuple[int, ...]
    max_new: int


@dataclass(frozen=True)
class WorkloadStats:
    """Sizes of a workload. min_prefill: prompt tokens that an engine with perfect prefix reuse has to compute."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    min_prefill: int


def shared(
    seed: int = 1, requests: int = 64, prefix: int = 512, suffix: int = 32, max_new: int = 32
) -> list[SegmentRequest]:
    """Requests that share a system prompt of `prefix` tokens and differ in the `suffix` tokens after it."""
    rng = np.random.default_rng(seed)
    system = _draw(rng, prefix)
    return [SegmentRequest(i, i, None, False, 0, system + _draw(rng, suffix), max_new) for i in range(requests)]


def multiturn(
    seed: int = 2, conversations: int = 8, turns: int = 6, user: int = 48, max_new: int = 32
) -> list[SegmentRequest]:
    """Conversations whose every turn continues the answer of the turn before by `user` tokens."""
    rng = np.random.default_rng(seed)
    return [
        SegmentRequest(
            id=turn * conversations + conv,
            conv=conv,
            parent=(turn - 1) * conversations + conv if turn else None,
            parent_gen=True,
            wave=turn,
            ids=_draw(rng, user),
            max_new=max_new,
        )
        for turn in range(turns)
        for conv in range(conversations)
    ]


def noshare(seed: int = 3, requests: int = 32, prompt: int = 256, max_new: int = 32) -> list[SegmentRequest]:
    """Requests that share nothing."""
    rng = np.random.default_rng(seed)
    return [SegmentRequest(i, i, None, False, 0, _draw(rng, prompt), max_new) for i in range(requests)]


def tree(seed: int = 4, levels: int = 3, fan: int = 4, segment: int = 96, max_new: int = 16) -> list[SegmentRequest]:
    """A tree of thoughts: each node's prompt is its parent's and one segment more; what it generates, its score, is no
    part of its children's prompts."""
    rng = np.random.default_rng(seed)
    rows = [SegmentRequest(0, 0, None, False, 0, _draw(rng, segment), max_new)]
    frontier = rows[:]
    for level in range(1, levels + 1):
        children: list[SegmentRequest] = []
        for parent in frontier:
            for _ in range(fan):
                request_id = len(rows) + len(children)
                children.append(SegmentRequest(request_id, 0, parent.id, False, level, _draw(rng, segment), max_new))
        rows += children
        frontier = children
    return rows


WORKLOADS: dict[str, Callable[[], list[SegmentRequest]]] = {
    "shared": shared,
    "multiturn": multiturn,
    "noshare": noshare,
    "tree": tree,
}


def waves(requests: Sequence[SegmentRequest]) -> list[list[SegmentRequest]]:
    """The requests grouped by wave, in order."""
    grouped: list[list[SegmentRequest]] = [[] for _ in range(max(request.wave for request in requests) + 1)]
    for request in requests:
        grouped[request.wave].append(request)
    return grouped


def stats(requests: Sequence[SegmentRequest]) -> WorkloadStats:
    """Sizes of a workload, `requests` in order of their ids.

    The last token of an answer has no KV when the next turn begins, so it is computed with that turn's prompt.
    """
    prompts: list[tuple[Hashable, ...]] = []
    has_kv: set[int] = set()
    min_prefill = 0
    for request in requests:
        prompt: tuple[Hashable, ...] = ()
        if request.parent is not None:
            prompt = prompts[request.parent]
            if request.parent_gen:
                prompt += _generated(requests[request.parent])
        prompt += request.ids
        prompts.append(prompt)
        prefixes = _prefix_hashes(prompt + _generated(request))
        min_prefill += len(set(prefixes[: len(prompt)]) - has_kv)
        has_kv.update(prefixes[:-1])
    return WorkloadStats(
        requests=len(requests),
        prompt_tokens=sum(map(len, prompts)),
        output_tokens=sum(request.max_new for request in requests),
        min_prefill=min_prefill,
    )


def _generated(request: SegmentRequest) -> tuple[Hashable, ...]:
    """Stand-ins for the ids that an engine generates."""
    return tuple((request.id, place) for place in range(request.max_new))


def _prefix_hashes(tokens: Sequence[Hashable]) -> list[int]:
    return list(itertools.accumulate(tokens, lambda prefix, token: hash((prefix, token)), initial=0))[1:]


def _draw(rng: np.random.Generator, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.integers(1000, 40000, num_tokens).tolist())
