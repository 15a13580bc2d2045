"""Which eviction policy finds most: python -m benchmarks.eviction_study TRACE... [--capacities N,...] [--json]

The tree alone, without scheduler or model: requests come in order, each is matched, locked, makes room for prompt and
output, and inserts its prompt; its output when it ends, which is when `IN_FLIGHT` others have begun. Figures are shares
of prompt tokens found, of each half of a trace by itself: choose on the first, report the second. The optimum is
Belady's for the whole trace. TRACE: what `radix-jax replay` reads; Mooncake's are at github.com/kvcache-ai/Mooncake.
"made-up" draws the conversations of `benchmarks.prefix_trace`, and "workloads" takes those of `benchmarks.workloads`
with a cache of a quarter of what they hold.

A page has 512 tokens, as a hash id of Mooncake's traces, so that a run takes seconds; 16 for the last two.
"""

import argparse
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.prefix_trace import TraceShape, make_trace
from benchmarks.workloads import WORKLOADS, SegmentRequest
from radix_jax.cache import RadixTree
from radix_jax.cache.handles import PrefixHandle
from radix_jax.config import EVICTION_POLICIES
from radix_jax.replay import Trace, TraceRequest, optimal_hit_tokens, read_trace
from radix_jax.replay.trace import GivenIds

IN_FLIGHT = 8
CAPACITIES = (500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000)
MADE_UP_CAPACITIES = (100_000, 250_000, 500_000)


@dataclass(frozen=True)
class Row:
    """Shares of prompt tokens found in the halves of a trace, by policy. optimum: of the whole trace."""

    trace: str
    page_size: int
    capacity: int
    first: dict[str, float]
    second: dict[str, float]
    optimum: float


def study(trace: Trace, page_size: int, capacity: int, policies: Sequence[str]) -> Row:
    """Run a trace under each of the policies with a cache of `capacity` tokens."""
    first: dict[str, float] = {}
    second: dict[str, float] = {}
    lens = np.array([request.prompt_len for request in trace])
    middle = len(trace) // 2
    for policy in policies:
        found = found_lens(trace, page_size, capacity, policy)
        first[policy] = float(found[:middle].sum() / max(lens[:middle].sum(), 1))
        second[policy] = float(found[middle:].sum() / max(lens[middle:].sum(), 1))
    best = optimal_hit_tokens(trace, range(len(trace)), page_size, capacity // page_size) / lens.sum()
    return Row(trace.name, page_size, capacity, first, second, float(best))


def found_lens(trace: Trace, page_size: int, capacity: int, policy: str) -> Int32[np.ndarray, " R"]:
    """Prompt tokens found for each request. A request that is larger than the cache is left out."""
    tree = RadixTree(page_size, policy, partial_pages=False)
    found = np.zeros(len(trace), np.int32)
    running: deque[tuple[PrefixHandle, Int32[np.ndarray, " T"]]] = deque()
    num_free = num_pages = capacity // page_size

    def end_oldest() -> int:
        """Pages that come back: those of an output that others have brought in the meantime."""
        handle, ids = running.popleft()
        inserted = tree.insert_prefix(ids, np.zeros(len(ids) // page_size, np.int32), start=handle)
        tree.unlock(handle)
        return (inserted.cached_len - handle.cached_len) // page_size

    for place, request in enumerate(trace):
        prompt = request.prompt_ids()
        ids = np.concatenate([prompt, trace.output_ids(place)])
        num_needed = len(ids) // page_size
        if num_needed > num_pages:
            continue
        match = tree.match_prefix(prompt[:-1])
        tree.lock(match.handle)
        found[place] = match.cached_len
        num_new = num_needed - match.cached_len // page_size
        while num_new > num_free:
            taken = len(tree.evict((num_new - num_free) * page_size))
            num_free += taken if taken else end_oldest()
        inserted = tree.insert_prefix(prompt, np.zeros(len(prompt) // page_size, np.int32))
        num_free -= num_needed - inserted.cached_len // page_size
        tree.lock(inserted.handle)
        tree.unlock(match.handle)
        running.append((inserted.handle, ids))
        if len(running) > IN_FLIGHT:
            num_free += end_oldest()
    return found


def made_up() -> Trace:
    """The conversations of `benchmarks.prefix_trace`, one after the other."""
    drawn = make_trace(TraceShape()).requests
    return Trace(
        "made-up",
        [_given(place, one.ids[: one.prompt_len], one.ids[one.prompt_len :]) for place, one in enumerate(drawn)],
    )


def workload(name: str) -> Trace:
    """A workload of `benchmarks.workloads`, wave after wave, answers made up."""
    prompts: dict[int, Int32[np.ndarray, " T"]] = {}
    requests: list[TraceRequest] = []
    for one in WORKLOADS[name]():
        prompts[one.id] = np.concatenate([_before(one, prompts), np.array(one.ids, np.int32)])
        requests.append(_given(one.wave, prompts[one.id], _answer(one.id, one.max_new)))
        if one.max_new:
            prompts[~one.id] = np.concatenate([prompts[one.id], _answer(one.id, one.max_new)])
    return Trace(name, requests)


def _before(one: SegmentRequest, prompts: dict[int, Int32[np.ndarray, " T"]]) -> Int32[np.ndarray, " T"]:
    if one.parent is None:
        return np.empty(0, np.int32)
    return prompts[~one.parent if one.parent_gen else one.parent]


def _answer(request_id: int, num_tokens: int) -> Int32[np.ndarray, " N"]:
    return 100_000 + request_id * 1_000 + np.arange(num_tokens, dtype=np.int32)


def _given(place: int, prompt: Int32[np.ndarray, " T"], output: Int32[np.ndarray, " N"]) -> TraceRequest:
    return TraceRequest(float(place), len(prompt), len(output), GivenIds(prompt), GivenIds(output))


def _num_tokens(trace: Trace) -> int:
    return sum(request.prompt_len + request.output_len for request in trace)


def main() -> None:
    """Print a table, or one JSON line, as the figures come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--capacities", help="tokens, with commas between")
    parser.add_argument("--policies", default=",".join(EVICTION_POLICIES), help="with commas between")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    policies = options.policies.split(",")
    given = [int(value) for value in options.capacities.split(",")] if options.capacities else None
    rows: list[Row] = []
    for name in options.traces:
        if name == "workloads":
            traces = [(workload(one), 16, [_num_tokens(workload(one)) // 4]) for one in WORKLOADS]
        elif name == "made-up":
            traces = [(made_up(), 16, given or list(MADE_UP_CAPACITIES))]
        else:
            traces = [(read_trace(name), 512, given or list(CAPACITIES))]
        for trace, page_size, capacities in traces:
            for capacity in capacities:
                rows.append(study(trace, page_size, capacity, policies))
                if not options.json:
                    print_row(rows[-1], policies)
    if options.json:
        print(json.dumps({"benchmark": "eviction_study", "rows": [asdict(row) for row in rows]}))


def print_row(row: Row, policies: Sequence[str]) -> None:
    """A line for each policy: first half, second half, and the second beside that of "lru"."""
    print(f"\n{row.trace}, pages of {row.page_size}, {row.capacity:,} tokens; optimum of the whole {row.optimum:.4f}")
    for policy in policies:
        beside = row.second[policy] / row.second["lru"] - 1 if row.second.get("lru") else 0.0
        print(f"  {policy:<14} {row.first[policy]:.4f}  {row.second[policy]:.4f}  {beside:+.1%}", flush=True)


if __name__ == "__main__":
    main()
