"""The waiting queue against a sorted list made from nothing, while pages come and go between any two yields."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.cache.radix_tree import RadixTree
from radix_jax.config import SCHEDULE_POLICIES
from radix_jax.request import Request, SamplingParams
from radix_jax.scheduler.policy import GENERATION_PASSES, QueueContext, QueueView, make_policy
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.request_state import Ticket
from radix_jax.scheduler.waiting import WaitingEntry, WaitingQueue

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
NAMESPACES = st.sampled_from((None, None, "a"))
ROUTING_KEYS = st.sampled_from((None, "x", "y"))
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


class WaitingMachine(RuleBasedStateMachine):
    """A queue, its tree, one pass that may be under way, and requests that compute."""

    @initialize(
        policy=st.sampled_from((*SCHEDULE_POLICIES, shortest_match_first)),
        page_size=st.sampled_from((1, 2, 3)),
    )
    def start(self, policy: str | Callable[[QueueView], Any], page_size: int) -> None:
        self.policy = make_policy(policy, seed=5)
        self.page_size = page_size
        self.cache = PrefixCache(RadixTree(page_size, eviction_policy="lru"), PagePool(40))
        self.queue = WaitingQueue(self.policy, self.cache)
        self.waiting: dict[str, tuple[RequestState, Ticket]] = {}
        self.computing: dict[str, RequestState] = {}
        self.left: list[tuple[RequestState, int]] = []
        self.out: list[tuple[RequestState, Ticket]] = []
        self.num_requests = self.num_passes = self.num_prefill_tokens = 0
        self.context = QueueContext()
        self.order: Iterator[WaitingEntry] | None = None
        self.yielded: set[str] = set()

    @rule(
        ids=IDS,
        namespace=NAMESPACES,
        max_tokens=st.integers(1, 3),
        priority=st.sampled_from((0, 0, 0, 1)),
        routing_key=ROUTING_KEYS,
    )
    def add(self, ids: list[int], namespace: Any, max_tokens: int, priority: int, routing_key: Any) -> None:
        self.num_requests += 1
        request = Request(
            request_id=str(self.num_requests),
            token_ids=np.asarray(ids, np.int32),
            sampling=SamplingParams(),
            max_tokens=max_tokens,
            stop_ids=frozenset(),
            seed=0,
            arrival=self.num_requests,
            namespace=namespace,
            priority=priority,
            routing_key=routing_key,
        )
        state = RequestState(request, self.page_size)
        ticket = self.queue.add(state, self.num_prefill_tokens)
        assert ticket == (self.num_passes, self.num_prefill_tokens)
        self.waiting[request.request_id] = state, ticket

    @rule(data=st.data())
    @precondition(lambda self: self.out)
    def come_back(self, data: st.DataObject) -> None:
        """A retracted request: with some output, under its old ticket; it counts as one that comes now."""
        state, ticket = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        if state.request_id in self.computing:
            self.queue.forget_computing(state.request_id)
            del self.computing[state.request_id]
        if state.num_tokens < len(state.tokens) - 1:
            state.append_token(data.draw(st.integers(0, 1)))
        assert self.queue.add(state, self.num_prefill_tokens, ticket) == ticket
        self.waiting[state.request_id] = state, ticket
        self.yielded.discard(state.request_id)

    @rule(data=st.data(), computes=st.booleans())
    @precondition(lambda self: self.waiting)
    def remove(self, data: st.DataObject, computes: bool) -> None:
        """Admitted or aborted, be it yielded or not; some compute on in later steps."""
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        state, ticket = self.waiting.pop(request_id)
        self.left.append((state, self.true_len(state)))
        self.queue.remove(request_id)
        self.out.append((state, ticket))
        if computes:
            self.queue.note_computing(state)
            self.computing[request_id] = state

    @rule(ids=IDS, namespace=NAMESPACES)
    def insert_other(self, ids: list[int], namespace: Any) -> None:
        request = Request(
            request_id="other",
            token_ids=np.asarray(ids, np.int32),
            sampling=SamplingParams(),
            max_tokens=1,
            stop_ids=frozenset(),
            seed=0,
            arrival=0,
            namespace=namespace,
        )
        self.insert(RequestState(request, self.page_size), len(ids))

    @rule(data=st.data())
    @precondition(lambda self: self.waiting or self.out)
    def insert_own(self, data: st.DataObject) -> None:
        """Pages of a request that waits, or that left the queue."""
        states = [state for state, _ in [*self.waiting.values(), *self.out]]
        state = data.draw(st.sampled_from(sorted(states, key=lambda each: each.request.arrival)))
        self.insert(state, data.draw(st.integers(1, state.num_tokens)))

    @rule(num_tokens=st.integers(1, 12), trim=st.booleans())
    def evict(self, num_tokens: int, trim: bool) -> None:
        self.cache.free(self.cache.tree.evict(num_tokens, trim))
        self.forget_left()

    @rule(ids=IDS, namespace=NAMESPACES)
    def match(self, ids: list[int], namespace: Any) -> None:
        """Splits nodes."""
        self.cache.match_prefix(ids, namespace)

    @rule(num_passes=st.sampled_from((1, GENERATION_PASSES // 2)), num_prefill_tokens=st.integers(0, 9))
    def end_pass(self, num_passes: int, num_prefill_tokens: int) -> None:
        self.order = None
        for _ in range(num_passes):
            self.queue.end_pass()
        self.num_passes += num_passes
        self.num_prefill_tokens += num_prefill_tokens

    @rule(x=st.integers(0, 2), y=st.integers(0, 2))
    def start_pass(self, x: int, y: int) -> None:
        running = {key: count for key, count in (("x", x), ("y", y)) if count}
        self.context = QueueContext(self.num_prefill_tokens, running)
        self.order = self.queue.in_order(self.context)
        self.yielded.clear()
        self.left.clear()
        self.look_at_next()

    @rule()
    @precondition(lambda self: self.order is not None)
    def look_at_next(self) -> None:
        assert self.order is not None
        entry = next(self.order, None)
        expected = next((state for state in self.sorted_list() if state.request_id not in self.yielded), None)
        if entry is None:
            assert expected is None
            self.order = None
            return
        assert entry.state is expected
        assert entry.matched_len == self.true_len(entry.state)
        self.yielded.add(entry.state.request_id)
        assert self.queue.would_repeat(entry) == any(
            self.repeats(entry.state, other) for other in self.computing.values()
        )

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "queue"):
            self.queue.check_integrity()
            assert len(self.queue) == len(self.waiting)

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


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
