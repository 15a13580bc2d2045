"""The waiting queue: always in the right order, and the tree asked only about what may have changed."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import pytest
from scheduling import FakeModel, RequestMaker, make_scheduler, run_all, step

from radix_jax.cache.keys import TokenIds
from radix_jax.cache.node import RadixTreeNode
from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.peek import Peek
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.cache.radix_tree import RadixTree
from radix_jax.config import SCHEDULE_POLICIES
from radix_jax.request import Request, SamplingParams
from radix_jax.scheduler.policy import QueueContext, QueueView, make_policy
from radix_jax.scheduler.request_state import RequestState, Ticket
from radix_jax.scheduler.waiting import WaitingQueue

GENERATION_PASSES = 256  # here; the real ones are many more, and would make these tests long


@pytest.fixture(autouse=True)
def short_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("policy", "waiting"):
        monkeypatch.setattr(f"radix_jax.scheduler.{module}.GENERATION_PASSES", GENERATION_PASSES)


class CountingCache(PrefixCache):
    """Counts the peeks: no other way leads from the queue to the tokens in the tree."""

    num_peeks = 0

    def peek(self, ids: TokenIds, namespace: Hashable = None, start: Peek | None = None) -> Peek:
        self.num_peeks += 1
        return super().peek(ids, namespace, start)


def counting_cache(page_size: int, num_pages: int) -> CountingCache:
    return CountingCache(RadixTree(page_size), PagePool(num_pages))


@pytest.fixture
def node_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a field of any tree node was read."""
    reads: Counter[str] = Counter()

    def counted(name: str, slot: Any) -> property:
        def read(node: RadixTreeNode) -> Any:
            reads[name] += 1
            return slot.__get__(node)

        return property(read, slot.__set__)

    for name in ("edge", "children", "parent", "end_len", "pages"):
        monkeypatch.setattr(RadixTreeNode, name, counted(name, RadixTreeNode.__dict__[name]))
    return reads


class Queue(WaitingQueue):
    """A queue over a cache of its own that makes its requests: "r0", "r1", ... by arrival."""

    def __init__(self, policy: str | Callable[[QueueView], Any], *, page_size: int = 4, num_pages: int = 257):
        self.cache = counting_cache(page_size, num_pages)
        self.arrivals = itertools.count()
        super().__init__(make_policy(policy, seed=3), self.cache)

    def come(self, ids: Any, max_tokens: int = 4, *, num_prefill_tokens: int = 0, **fields: Any) -> RequestState:
        arrival = next(self.arrivals)
        request = Request(
            request_id=f"r{arrival}",
            token_ids=np.asarray(ids, np.int32),
            sampling=SamplingParams(),
            max_tokens=max_tokens,
            stop_ids=frozenset(),
            seed=0,
            arrival=arrival,
            **fields,
        )
        state = RequestState(request, self.cache.page_size)
        self.add(state, num_prefill_tokens)
        return state

    def put(self, state: RequestState, num_computed: int) -> None:
        """Insert the state's first tokens as a running request would, and tell the queue."""
        cache = self.cache
        pages = cache.allocate(num_computed // cache.page_size)
        version = cache.tree.version
        result = cache.tree.insert_prefix(state.tokens[:num_computed], pages, state.request.namespace)
        cache.free(pages[: result.cached_len // cache.page_size])
        self.note_inserted(state, range(result.cached_len, num_computed), cache.tree.version - version)

    def evict(self, num_tokens: int) -> None:
        self.cache.free(self.cache.tree.evict(num_tokens))

    def ids(self, context: QueueContext | None = None) -> list[str]:
        self.check_integrity()
        return [entry.state.request_id for entry in self.in_order(context)]


def test_a_thousand_long_requests_are_not_matched_while_the_tree_stays() -> None:
    rng = np.random.default_rng(0)
    cache = counting_cache(16, 4097)
    scheduler = make_scheduler(page_size=16, num_pages=4097, max_model_len=20_000, max_running_requests=2, cache=cache)
    model, make = FakeModel(4097, 16), RequestMaker()
    stem = rng.integers(0, 1000, 8_000, np.int32)
    for _ in range(1_000):
        scheduler.add(make(np.concatenate([stem, rng.integers(0, 1000, 8_000, np.int32)]), 40))
    kinds = []
    while kinds[-2:] != ["decode", "decode"]:
        plan = scheduler.plan()
        assert plan is not None
        kinds.append(plan.kind)
        scheduler.commit(plan, model.run(plan))
    num_peeks, version = cache.num_peeks, cache.tree.version
    for _ in range(20):
        plan = scheduler.plan()
        assert plan is not None
        assert plan.kind == "decode"
        scheduler.commit(plan, model.run(plan))
    assert cache.tree.version == version
    assert scheduler.num_waiting == 998
    assert cache.num_peeks == num_peeks


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_a_pass_over_a_thousand_visits_no_node_while_the_tree_stays(policy: str, node_reads: Counter[str]) -> None:
    rng = np.random.default_rng(0)
    queue = Queue(policy, page_size=16, num_pages=2049)
    families = [rng.integers(0, 1000, 8_000, np.int32) for _ in range(2)]
    states = [
        queue.come(np.append(families[i % 2], rng.integers(0, 1000, 8_000, np.int32)), routing_key=i % 7)
        for i in range(1_000)
    ]
    queue.put(states[0], 9_600)
    queue.put(states[1], 4_800)
    context = QueueContext(1_000, {3: 1})
    before = queue.ids(context)
    assert set(before) == {f"r{i}" for i in range(1_000)}
    num_peeks = queue.cache.num_peeks
    node_reads.clear()
    for now in range(5):
        queue.end_pass()
        # What is read of the running ones may change, the tree stays.
        order = queue.in_order(QueueContext(1_000 + 100 * now, {3: 1, now: 2}))
        assert len({entry.state.request_id for entry in order}) == 1_000
    assert [entry.state.request_id for entry in queue.in_order(context)] == before
    assert queue.cache.num_peeks == num_peeks
    assert not node_reads


def test_keys_are_made_only_for_what_changed() -> None:
    calls: list[int] = []

    def counted_lpm(view: QueueView) -> int:
        calls.append(view.arrival)
        return -view.matched_len

    queue = Queue(counted_lpm)
    states = [queue.come([first] * 8 + [i]) for i, first in enumerate([0, 0, 1, 1, 2])]
    queue.ids()
    calls.clear()
    assert queue.ids() == ["r0", "r1", "r2", "r3", "r4"]
    assert calls == []
    queue.put(states[2], 8)
    assert queue.ids() == ["r2", "r3", "r0", "r1", "r4"]
    assert sorted(calls) == [2, 3]


def test_only_what_waits_for_the_inserted_page_is_matched_again() -> None:
    queue = Queue("lpm")
    cache = queue.cache
    families = [np.arange(start, start + 20, dtype=np.int32) for start in (0, 100, 200)]
    states = [queue.come([*family, 900 + tail]) for family in families for tail in range(10)]
    assert cache.num_peeks == 30
    queue.put(states[10], 8)
    assert cache.num_peeks == 40
    assert queue.ids()[:10] == [f"r{i}" for i in range(10, 20)]
    cache.num_peeks = 0
    # Beyond its first page this one is like no other.
    loner = RequestState(RequestMaker()([*families[1][:8], 7, 7, 7, 7, 7]), 4)
    queue.put(loner, 12)
    assert cache.num_peeks == 0
    assert queue.ids()[:10] == [f"r{i}" for i in range(10, 20)]
    assert cache.num_peeks == 0
    queue.check_integrity()


def test_only_what_an_eviction_touched_is_matched_again() -> None:
    queue = Queue("dfs-weight")
    families = [np.arange(start, start + 20, dtype=np.int32) for start in (0, 100, 200)]
    states = [queue.come([*family, 900 + tail]) for family in families for tail in range(10)]
    for i in (10, 20, 0):
        queue.put(states[i], 20)
    assert queue.ids() == [f"r{i}" for i in range(30)]
    queue.cache.num_peeks = 0
    queue.evict(20)
    order = queue.in_order()
    assert next(order).state.request_id == "r0"
    # Ten whose match is gone, and the one that is yielded.
    assert queue.cache.num_peeks == 11
    assert [entry.state.request_id for entry in order] == [
        f"r{i}" for i in [*range(1, 10), *range(20, 30), *range(10, 20)]
    ]


def test_noting_a_long_insertion_looks_up_only_where_somebody_waits() -> None:
    queue = Queue("lpm", page_size=1, num_pages=20_001)
    state = queue.come(np.arange(16_000))
    queue.come([*range(100), -1, -2])
    queue.come([-5, -6])

    class CountedTokens(np.ndarray):
        num_slices = 0

        def __getitem__(self, key: Any) -> Any:
            CountedTokens.num_slices += 1
            return super().__getitem__(key)

    pages = queue.cache.allocate(16_000)
    queue.cache.tree.insert_prefix(state.tokens[:16_000], pages)
    plain = state.tokens
    state.tokens = plain.view(CountedTokens)
    queue.note_inserted(state, range(16_000), 1)
    state.tokens = plain
    # All three were filed under their first page: one look-up, and one more of the ids of the one that is matched on.
    assert CountedTokens.num_slices <= 4
    assert [entry.matched_len for entry in queue.in_order()] == [15_999, 100, 0]


def test_a_fall_is_seen_when_it_matters() -> None:
    queue = Queue("lpm")
    _, short, long = (queue.come([*range(first, first + 20), 999]) for first in (200, 0, 100))
    queue.put(long, 20)
    queue.put(short, 8)
    assert queue.ids() == ["r2", "r1", "r0"]
    queue.evict(20)
    assert queue.cache.tree.match_len(long.prompt) == 0
    assert queue.ids() == ["r1", "r0", "r2"]
    # Back again, deeper than what the queue remembers.
    queue.put(long, 20)
    assert queue.ids() == ["r2", "r1", "r0"]


def test_each_yielded_match_is_current_even_if_eviction_comes_in_between() -> None:
    queue = Queue("lpm")
    for first in (0, 100):
        queue.put(queue.come([*range(first, first + 20), 999]), 20)
    order = queue.in_order()
    assert next(order).matched_len == 20
    queue.remove("r0")
    queue.evict(40)
    entry = next(order)
    assert (entry.state.request_id, entry.matched_len) == ("r1", 0)
    assert len(queue) == 1
    assert "r0" not in queue


def test_each_yielded_match_is_current_even_if_others_insert_untold() -> None:
    queue = Queue("lpm")
    states = [queue.come([*range(first, first + 20), 999]) for first in (0, 100)]
    queue.ids()
    for state in states[::-1]:
        queue.cache.tree.insert_prefix(state.tokens[:8], queue.cache.allocate(2))
    assert [(entry.state.request_id, entry.matched_len) for entry in queue.in_order()] == [("r0", 8), ("r1", 8)]


def test_siblings_of_an_admitted_request_follow_at_once() -> None:
    queue = Queue("lpm")
    first, other, sibling = (queue.come(ids) for ids in ([1] * 8 + [2], [5] * 9, [1] * 8 + [3]))
    order = queue.in_order()
    assert next(order).state is first
    queue.remove("r0")
    queue.put(first, 8)
    entry = next(order)
    assert (entry.state, entry.matched_len) == (sibling, 8)
    assert next(order).state is other
    assert next(order, None) is None


def test_who_comes_while_the_queue_is_looked_through_is_yielded_and_who_leaves_is_not() -> None:
    queue = Queue("lof")
    for max_tokens in (5, 4, 3):
        queue.come([1, 2], max_tokens)
    order = queue.in_order()
    assert next(order).state.request_id == "r0"
    queue.come([1, 2], 9)
    queue.remove("r1")
    queue.remove("r0")
    assert [entry.state.request_id for entry in order] == ["r3", "r2"]


def test_who_leaves_during_a_pass_counts_for_its_subtree_until_the_pass_ends() -> None:
    queue = Queue("dfs-weight", page_size=1)
    a, b = (RequestState(RequestMaker()([first, 9]), 1) for first in (1, 2))
    queue.put(a, 1)
    queue.put(b, 1)
    for ids in ([2, 3, 9], [1, 3, 9], [1, 4, 9], [2, 4, 9], [1, 5, 9]):
        queue.come(ids)
    order = queue.in_order()
    assert next(order).state.request_id == "r1"
    queue.remove("r1")
    queue.come([8, 8])  # makes the order anew: below 1 and below 2 two wait each
    assert [entry.state.request_id for entry in order] == ["r2", "r4", "r0", "r3", "r5"]
    # In the next pass it counts no more, and of equal weights the earlier arrival goes first.
    assert queue.ids() == ["r0", "r3", "r2", "r4", "r5"]


@pytest.mark.parametrize("policy", [*SCHEDULE_POLICIES, lambda view: -view.arrival])
def test_priority_goes_before_every_policy(policy: str | Callable[[QueueView], Any]) -> None:
    queue = Queue(policy, page_size=1)
    for i in range(12):
        ids = [i % 3] * (i + 2)
        state = queue.come(ids, 5 + i % 4, priority=i % 3, routing_key=i % 2)
        if i % 4 == 1:
            queue.put(state, i)
    before = queue.ids(QueueContext(50, {1: 2}))
    assert [int(name[1:]) % 3 for name in before] == [2] * 4 + [1] * 4 + [0] * 4
    alone = Queue(policy, page_size=1)
    states = {}
    for i in range(12):
        states[i] = alone.come([i % 3] * (i + 2), 5 + i % 4, routing_key=i % 2)
        if i % 4 == 1:
            alone.put(states[i], i)
    flat = alone.ids(QueueContext(50, {1: 2}))
    assert before == sorted(flat, key=lambda name: -(int(name[1:]) % 3))


def test_hrrn_counts_from_the_arrival() -> None:
    queue = Queue("hrrn")
    queue.come(range(100), num_prefill_tokens=0)
    queue.come(range(100, 110), num_prefill_tokens=950)
    queue.come(range(200, 205), num_prefill_tokens=1_000)
    # 1000 / 100, 50 / 10, 0 / 5
    assert queue.ids(QueueContext(1_000)) == ["r0", "r1", "r2"]
    # 1080 / 100, 130 / 10, 80 / 5
    assert queue.ids(QueueContext(1_080)) == ["r2", "r1", "r0"]


def test_routing_keys_follow_what_runs() -> None:
    queue = Queue("routing-key")
    for key in ("a", "b", None, "b", "a"):
        queue.come([1, 2], routing_key=key)
    assert queue.ids() == ["r2", "r0", "r4", "r1", "r3"]
    running = {"b": 1}
    assert queue.ids(QueueContext(0, running)) == ["r1", "r3", "r2", "r0", "r4"]
    running["a"] = 2
    assert queue.ids(QueueContext(0, running)) == ["r0", "r4", "r1", "r3", "r2"]


def test_a_retracted_request_keeps_its_seniority_and_is_matched_by_its_output_too() -> None:
    queue = Queue("lpm", page_size=2)
    state = queue.come([1, 2, 3], 6, num_prefill_tokens=7)
    for _ in range(10):
        queue.end_pass()
    queue.remove("r0")
    newcomer = queue.come([1, 2, 3, 4], 6)
    for token in (4, 5, 6):
        state.append_token(token)
    queue.put(state, 4)
    assert queue.add(state, 99, Ticket(0, 7)) == Ticket(0, 7)
    entries = list(queue.in_order())
    assert [(entry.state, entry.matched_len) for entry in entries] == [(state, 4), (newcomer, 2)]
    assert queue.standing("r0").passes_waited == 10
    # All but its last known token can be cached; the whole page in front of it too.
    state.append_token(7)
    queue.remove("r0")
    queue.add(state)
    queue.put(state, 6)
    assert next(queue.in_order()).matched_len == 6
    queue.check_integrity()


def test_a_rule_of_ones_own_sees_the_queue() -> None:
    seen: dict[int, QueueView] = {}

    def last_come_first(view: QueueView) -> tuple[float, ...]:
        seen[view.arrival] = view
        return (view.passes_waited, -view.arrival)

    queue = Queue(last_come_first)
    first = queue.come([1] * 9, 5, num_prefill_tokens=30, routing_key="k")
    queue.put(first, 4)
    queue.end_pass()
    queue.come([2] * 3)
    assert queue.ids(QueueContext(100, {"k": 2})) == ["r1", "r0"]
    assert seen[0] == QueueView(
        prompt_len=9,
        max_tokens=5,
        matched_len=4,
        arrival=0,
        joined_pass=0,
        num_passes=1,
        prefilled_since=70,
        routing_key="k",
        num_running_alike=2,
    )


def test_a_bad_rule_adds_nobody_and_leaves_the_queue_whole() -> None:
    bad: set[int] = set()

    def moody(view: QueueView) -> Any:
        return "soon" if view.arrival in bad else -view.matched_len

    queue = Queue(moody)
    states = [queue.come([i] * 9) for i in range(3)]
    bad.add(3)
    with pytest.raises(TypeError, match="moody gave 'soon' for the request of arrival 3"):
        queue.come([3] * 9)
    assert queue.ids() == ["r0", "r1", "r2"]
    bad.add(1)
    for state in states:
        queue.put(state, 8)
    with pytest.raises(TypeError, match="moody gave 'soon' for the request of arrival 1"):
        queue.ids()
    queue.check_integrity()
    assert len(queue) == 3
    bad.remove(1)
    assert queue.ids() == ["r0", "r1", "r2"]
    bad.add(1)
    queue.remove("r1")
    assert queue.ids() == ["r0", "r2"]


def test_standing_says_why_a_request_waits() -> None:
    queue = Queue("lpm")
    for i in range(3):
        queue.put(queue.come([i] * 9), 4 * (i % 2))
    queue.end_pass()
    assert queue.standing("r1") == (0, 0, (-4,), 4, 1)
    assert queue.standing("r2") == (2, 0, (0,), 0, 1)


def hot_arrivals(queue: Queue, num_passes: int) -> Iterator[tuple[int, str]]:
    """Each pass a request comes that every policy likes, and one is admitted; who was, by pass."""
    for now in range(num_passes):
        queue.come([7] * 8 + [now], 50, num_prefill_tokens=now - 5, routing_key="hot")
        [first, *_] = itertools.islice(queue.in_order(QueueContext(now, {"hot": 1})), 1)
        queue.remove(first.state.request_id)
        queue.end_pass()
        yield now, first.state.request_id


def longest_waiter_last(view: QueueView) -> int:
    return -view.arrival


@pytest.mark.parametrize("policy", [*SCHEDULE_POLICIES, longest_waiter_last])
def test_a_cold_request_waits_no_longer_than_a_generation(policy: str | Callable[[QueueView], Any]) -> None:
    queue = Queue(policy)
    cold = queue.come([1] * 100, 2)
    queue.put(RequestState(RequestMaker()([7] * 9), 4), 8)
    admitted = dict(hot_arrivals(queue, 3 * GENERATION_PASSES))
    [waited] = [now for now, request_id in admitted.items() if request_id == cold.request_id]
    assert waited <= GENERATION_PASSES
    if policy in ("routing-key", "lof", longest_waiter_last):
        assert waited == GENERATION_PASSES
    # Everyone who came in an earlier generation goes before all of a later one.
    last = max(now for now, name in admitted.items() if int(name[1:]) <= GENERATION_PASSES)
    assert last <= GENERATION_PASSES + 1


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_waiting_neither_splits_a_node_nor_refreshes_recency(policy: str) -> None:
    cache = counting_cache(1, 33)
    scheduler = make_scheduler(num_pages=33, max_running_requests=1, schedule_policy=policy, cache=cache)
    model, make = FakeModel(33, 1), RequestMaker()
    older, newer = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]
    for prompt in (older, newer):
        scheduler.add(make(prompt, 1))
        run_all(scheduler, model)
    scheduler.add(make([9, 9], 12))
    step(scheduler, model)
    before = repr(cache.tree.snapshot())
    scheduler.add(make([*older[:3], 7], 2))
    for _ in range(5):
        step(scheduler, model)
    assert scheduler.num_waiting == 1
    assert repr(cache.tree.snapshot()) == before
    cache.free(cache.tree.evict(1))
    assert (cache.tree.match_len(older), cache.tree.match_len(newer)) == (0, 6)
