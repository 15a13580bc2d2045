"""The waiting queue against a sorted list made from nothing, while pages come and go between any two yields."""

import random
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.cache.radix_tree import RadixTree
from radix_jax.config import SCHEDULE_POLICIES
from radix_jax.request import Request, SamplingParams
from radix_jax.scheduler.policy import QueueContext, QueueView, make_policy
from radix_jax.scheduler.request_state import RequestState, Ticket
from radix_jax.scheduler.waiting import WaitingEntry, WaitingQueue

GENERATION_PASSES = 256  # here; the real ones are many more, and would make these tests long


@pytest.fixture(autouse=True)
def short_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("policy", "waiting"):
        monkeypatch.setattr(f"radix_jax.scheduler.{module}.GENERATION_PASSES", GENERATION_PASSES)


NAMESPACES: tuple[Hashable, ...] = (None, None, "a")
ROUTING_KEYS: tuple[Hashable, ...] = (None, "x", "y")
Prefix = tuple[Any, ...]


def shortest_match_first(view: QueueView) -> tuple[float, ...]:
    """The contrary of all others: a match that is lost brings a request forward."""
    return view.matched_len, -view.passes_waited, view.prefilled_since, view.num_running_alike


class Counted:
    """A request that counts for the weights of dfs-weight: the pages of its match as one prefix, and its arrival."""

    def __init__(self, prefix: Prefix, arrival: int):
        self.prefix = prefix
        self.arrival = arrival


def depth_first(counted: list[Counted]) -> list[Counted]:
    """dfs-weight by the book: a trie of pages, visited from its root."""

    def visit(prefix: Prefix, below: list[Counted]) -> list[Counted]:
        own = sorted((each for each in below if each.prefix == prefix), key=lambda each: each.arrival)
        children: dict[Any, list[Counted]] = {}
        for each in below:
            if each.prefix != prefix:
                children.setdefault(each.prefix[len(prefix)], []).append(each)
        heavy_first = sorted(children.items(), key=lambda item: (-len(item[1]), min(each.arrival for each in item[1])))
        return [each for page, group in heavy_first for each in visit((*prefix, page), group)] + own

    return visit((), counted)


class Walk:
    """A queue, its tree, one pass that may be under way, and requests that compute; and the same by the book."""

    def __init__(self, policy: str | Callable[[QueueView], Any], page_size: int, seed: int):
        self.rng = random.Random(seed)
        self.policy = make_policy(policy, seed=5)
        self.page_size = page_size
        self.cache = PrefixCache(RadixTree(page_size), PagePool(self.rng.choice((20, 60))))
        self.queue = WaitingQueue(self.policy, self.cache)
        self.waiting: dict[str, tuple[RequestState, Ticket]] = {}
        self.computing: dict[str, RequestState] = {}
        self.left: list[tuple[RequestState, int]] = []
        self.out: list[tuple[RequestState, Ticket]] = []
        self.num_requests = self.num_passes = self.num_prefill_tokens = 0
        self.context = QueueContext()
        self.order: Iterator[WaitingEntry] | None = None
        self.yielded: set[str] = set()

    def go(self, num_steps: int) -> None:
        steps = {
            self.add: 8,
            self.admit_next: 6,
            self.look_at_next: 8,
            self.look_at_the_rest: 1,
            self.start_pass: 3,
            self.end_pass: 1,
            self.abort: 2,
            self.come_back: 2,
            self.insert_other: 2,
            self.insert_own: 2,
            self.match_other: 1,
            self.evict: 2,
        }
        for step in self.rng.choices(list(steps), list(steps.values()), k=num_steps):
            step()
            self.queue.check_integrity()
            assert len(self.queue) == len(self.waiting)

    def add(self) -> None:
        if len(self.waiting) > 12:
            return
        state = self.random_state()
        self.waiting[state.request_id] = state, self.queue.add(state, self.num_prefill_tokens)
        assert self.waiting[state.request_id][1] == (self.num_passes, self.num_prefill_tokens)

    def come_back(self) -> None:
        """A retracted request: with some output, under its old ticket; it counts as one that comes now."""
        if not self.out:
            return
        state, ticket = self.out.pop(self.rng.randrange(len(self.out)))
        if self.computing.pop(state.request_id, None):
            self.queue.forget_computing(state.request_id)
        if state.num_tokens < len(state.tokens) - 1:
            state.append_token(self.rng.randrange(2))
        assert self.queue.add(state, self.num_prefill_tokens, ticket) == ticket
        self.waiting[state.request_id] = state, ticket
        self.yielded.discard(state.request_id)

    def abort(self) -> None:
        """Be it yielded or not."""
        if self.waiting:
            self.remove(self.rng.choice(sorted(self.waiting)), computes=False)

    def admit_next(self) -> None:
        """A chunk of its pages enters the tree at once; it may compute on in later steps."""
        state = self.look_at_next()
        if state is not None:
            chunk_len = self.rng.randrange(12)
            self.remove(state.request_id, computes=chunk_len < state.num_tokens)
            self.insert(state, min(chunk_len, state.num_tokens))

    def remove(self, request_id: str, *, computes: bool) -> None:
        state, ticket = self.waiting.pop(request_id)
        self.left.append((state, self.true_len(state)))
        self.queue.remove(request_id)
        self.out.append((state, ticket))
        if computes:
            self.queue.note_computing(state)
            self.computing[request_id] = state

    def insert_other(self) -> None:
        state = self.random_state()
        self.insert(state, state.num_tokens)

    def insert_own(self) -> None:
        """Pages of a request that waits, or that left the queue."""
        states = [state for state, _ in [*self.waiting.values(), *self.out]]
        if states:
            state = self.rng.choice(states)
            self.insert(state, self.rng.randint(1, state.num_tokens))

    def evict(self) -> None:
        self.cache.free(self.cache.tree.evict(self.rng.randint(1, 12), trim=self.rng.random() < 0.5))
        self.forget_left()

    def match_other(self) -> None:
        """Splits nodes."""
        self.cache.match_prefix(self.random_state().prompt)

    def end_pass(self) -> None:
        self.order = None
        num_passes = self.rng.choice((1, 1, 1, GENERATION_PASSES))
        for _ in range(num_passes):
            self.queue.end_pass()
        self.num_passes += num_passes

    def start_pass(self) -> None:
        self.num_prefill_tokens += self.rng.randrange(10)
        running = {key: count for key in ("x", "y") if (count := self.rng.randrange(3))}
        self.context = QueueContext(self.num_prefill_tokens, running)
        self.order = self.queue.in_order(self.context)
        self.yielded.clear()
        self.left.clear()
        self.look_at_next()

    def look_at_next(self) -> RequestState | None:
        if self.order is None:
            return None
        entry = next(self.order, None)
        expected = next((state for state in self.sorted_list() if state.request_id not in self.yielded), None)
        if entry is None:
            assert expected is None
            self.order = None
            return None
        assert entry.state is expected
        assert entry.matched_len == self.true_len(entry.state)
        self.yielded.add(entry.state.request_id)
        repeats = [self.repeats(entry.state, other) for other in self.computing.values()]
        assert self.queue.would_repeat(entry) == any(repeats)
        return entry.state

    def look_at_the_rest(self) -> None:
        while self.look_at_next() is not None:
            pass

    def random_state(self) -> RequestState:
        self.num_requests += 1
        rng = self.rng
        request = Request(
            request_id=str(self.num_requests),
            token_ids=np.array([rng.randrange(2) for _ in range(rng.randint(1, 10))], np.int32),
            sampling=SamplingParams(),
            max_tokens=rng.randint(1, 3),
            stop_ids=frozenset(),
            seed=0,
            arrival=self.num_requests,
            namespace=rng.choice(NAMESPACES),
            priority=rng.choice((0, 0, 0, 1)),
            routing_key=rng.choice(ROUTING_KEYS),
        )
        return RequestState(request, self.page_size)

    def insert(self, state: RequestState, num_tokens: int) -> None:
        num_pages = num_tokens // self.page_size
        if num_pages > self.cache.num_available:
            return
        pages = self.cache.allocate(num_pages)  # may evict
        self.forget_left()
        version = self.cache.tree.version
        ids = state.tokens[: num_pages * self.page_size]
        result = self.cache.tree.insert_prefix(ids, pages, state.request.namespace)
        self.cache.free(pages[: result.cached_len // self.page_size])
        self.queue.note_inserted(state, range(len(ids)), self.cache.tree.version - version)

    def forget_left(self) -> None:
        """Of those who left, only those count whose prefix never went."""
        self.left = [(state, length) for state, length in self.left if self.reach(state) >= length]

    def reach(self, state: RequestState) -> int:
        return self.cache.match_len(state.known, state.request.namespace)

    def true_len(self, state: RequestState) -> int:
        return self.cache.match_len(state.known[:-1], state.request.namespace)

    def repeats(self, state: RequestState, other: RequestState) -> bool:
        """Whether `other` computes the page that `state` needs next."""
        end = self.true_len(state) + self.page_size
        same = state.request.namespace == other.request.namespace
        return (
            same
            and end < state.num_tokens
            and end <= other.num_tokens
            and (state.known[:end].tolist() == other.known[:end].tolist())
        )

    def prefix(self, state: RequestState, length: int) -> Prefix:
        pages = [tuple(state.tokens[i : i + self.page_size].tolist()) for i in range(0, length, self.page_size)]
        return ((state.request.namespace, pages[0]), *pages[1:]) if pages else ()

    def sorted_list(self) -> list[RequestState]:
        keys: dict[str, Any] = {}
        if self.policy.rule is None:
            counted = {
                request_id: Counted(self.prefix(state, self.true_len(state)), state.request.arrival)
                for request_id, (state, _) in self.waiting.items()
            }
            left = [Counted(self.prefix(state, length), state.request.arrival) for state, length in self.left]
            places = {id(each): i for i, each in enumerate(depth_first([*counted.values(), *left]))}
            keys = {request_id: places[id(each)] for request_id, each in counted.items()}
        else:
            for request_id, (state, ticket) in self.waiting.items():
                keys[request_id] = self.policy.rule(self.view(state, ticket))

        def rank(item: tuple[RequestState, Ticket]) -> Any:
            state, ticket = item
            generation = ticket.joined_pass // GENERATION_PASSES
            return -state.request.priority, generation, keys[state.request_id], state.request.arrival

        return [state for state, _ in sorted(self.waiting.values(), key=rank)]

    def view(self, state: RequestState, ticket: Ticket) -> QueueView:
        request = state.request
        return QueueView(
            prompt_len=state.num_tokens,
            max_tokens=request.prompt_len + request.max_tokens - state.num_tokens,
            matched_len=self.true_len(state),
            arrival=request.arrival,
            joined_pass=ticket.joined_pass,
            num_passes=self.num_passes,
            prefilled_since=max(self.context.num_prefill_tokens - ticket.num_prefill_tokens, 0),
            routing_key=request.routing_key,
            num_running_alike=self.context.running_keys.get(request.routing_key, 0),
        )


@pytest.mark.parametrize("policy", [*SCHEDULE_POLICIES, shortest_match_first])
@given(seed=st.integers(0, 2**32 - 1), page_size=st.sampled_from((1, 2)))
@example(seed=1238421, page_size=2)  # a prefix of one who left is evicted and comes back between two yields
@example(seed=1238584, page_size=1)  # one leaves whose prefix did so before
@example(seed=1239010, page_size=1)  # one comes and leaves between two yields
@settings(max_examples=6)
def test_the_queue_is_the_sorted_list(policy: str | Callable[[QueueView], Any], seed: int, page_size: int) -> None:
    Walk(policy, page_size, seed).go(200)
