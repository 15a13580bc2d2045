"""Who is left for a later step: exactly those whose very next page a running prompt will compute."""

import numpy as np
import pytest

from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.cache.radix_tree import RadixTree
from radix_jax.request import CACHE_MODES, CacheMode, Request, SamplingParams
from radix_jax.scheduler.policy import make_policy
from radix_jax.scheduler.request_state import RequestState, SampleGroup
from radix_jax.scheduler.waiting import WaitingQueue

PAGE_SIZE = 4


class Case:
    """A queue, and a request of 24 tokens that runs, of which the first eight are computed and in the tree."""

    def __init__(self) -> None:
        self.cache = PrefixCache(RadixTree(PAGE_SIZE), PagePool(129))
        self.queue = WaitingQueue(make_policy("fcfs"), self.cache)
        self.num_requests = 0
        self.running = self.state(range(24))
        self.insert(self.running, 8)
        self.queue.note_computing(self.running)

    def state(self, ids: object, namespace: str | None = None) -> RequestState:
        self.num_requests += 1
        request = Request(
            request_id=f"r{self.num_requests}",
            token_ids=np.asarray(ids, np.int32),
            sampling=SamplingParams(),
            max_tokens=8,
            stop_ids=frozenset(),
            seed=0,
            arrival=self.num_requests,
            namespace=namespace,
        )
        return RequestState(request, PAGE_SIZE)

    def insert(self, state: RequestState, num_tokens: int) -> None:
        version = self.cache.tree.version
        pages = self.cache.allocate(num_tokens // PAGE_SIZE)
        result = self.cache.tree.insert_prefix(state.tokens[:num_tokens], pages, state.request.namespace)
        self.cache.free(pages[: result.cached_len // PAGE_SIZE])
        self.queue.note_inserted(state, range(result.cached_len, num_tokens), self.cache.tree.version - version)

    def waits(self, ids: object, namespace: str | None = None) -> bool:
        """Whether a request with these ids would be left for later."""
        state = self.state(ids, namespace)
        self.queue.add(state)
        return self.would_repeat(state)

    def would_repeat(self, state: RequestState) -> bool:
        [entry] = [entry for entry in self.queue.in_order() if entry.state is state]
        self.queue.check_integrity()
        return self.queue.would_repeat(entry)


def test_the_next_page_decides() -> None:
    case = Case()
    assert case.waits([*range(12), 99])
    assert case.waits([*range(23), 99])
    # Leaves it inside the next page, or before; or needs no whole page more.
    assert not case.waits([*range(11), 99, 99, 99])
    assert not case.waits([*range(6), 99, 99, 99, 99, 99, 99, 99])
    assert not case.waits(range(9))
    # The last token is computed even if it is cached, so this one shares no further page.
    assert not case.waits(range(12))
    assert case.waits(range(13))
    # The same page behind another prefix, or in another namespace.
    assert not case.waits([50, *range(1, 24)])
    assert not case.waits(range(24), namespace="other")


def test_the_end_of_the_running_prompt_counts_in_whole_pages() -> None:
    case = Case()
    short = case.state([*range(8), 70, 71, 72, 73, 74, 75])
    case.insert(short, 8)
    case.queue.note_computing(short)
    assert case.waits([*range(8), 70, 71, 72, 73, 99])
    case.insert(short, 12)
    # Its last two tokens fill no page.
    assert not case.waits([*range(8), 70, 71, 72, 73, 74, 75, 76, 77, 78])


def test_a_page_that_entered_the_tree_is_no_reason_to_wait() -> None:
    case = Case()
    sibling = case.state([*range(14), 99])
    case.queue.add(sibling)
    assert case.would_repeat(sibling)
    case.insert(case.running, 12)
    assert not case.would_repeat(sibling)
    assert case.waits(range(20))
    case.queue.forget_computing(case.running.request_id)
    assert not case.waits(range(20))


def test_noting_again_and_forgetting_twice_do_no_harm() -> None:
    case = Case()
    case.queue.note_computing(case.running)
    assert case.waits(range(20))
    for _ in range(2):
        case.queue.forget_computing(case.running.request_id)
        assert not case.waits(range(20))


def test_others_may_be_further_than_the_running_one() -> None:
    case = Case()
    ahead = case.state([*range(16), 99])
    case.insert(ahead, 16)
    assert case.waits(range(23))
    assert not case.waits(range(18))


def test_what_others_put_behind_its_pages_may_be_evicted_again() -> None:
    case = Case()
    sibling = case.state(range(23))
    case.queue.add(sibling)
    handle = case.cache.match_prefix(case.running.tokens[:8]).handle
    case.cache.lock(handle)
    case.insert(case.state([*range(16), 99]), 16)
    assert case.would_repeat(sibling)
    case.cache.free(case.cache.tree.evict(8))
    assert case.cache.match_len(sibling.prompt) == 8
    assert case.would_repeat(sibling)


def test_a_cold_request_waits_for_a_cold_one() -> None:
    case = Case()
    cold = case.state(range(100, 140), namespace="new")
    case.queue.note_computing(cold)
    assert case.waits([*range(100, 104), 9], namespace="new")
    assert not case.waits(range(100, 140))
    case.insert(cold, 4)
    assert not case.waits([*range(100, 104), 9], namespace="new")
    assert case.waits([*range(100, 108), 9], namespace="new")


def test_splits_change_nothing() -> None:
    case = Case()
    sibling = case.state(range(23))
    case.queue.add(sibling)
    assert case.would_repeat(sibling)
    case.cache.match_prefix(range(4))
    assert case.would_repeat(sibling)
    case.insert(case.state([*range(4), 9, 9, 9, 9]), 8)
    assert case.would_repeat(sibling)


def test_a_retracted_request_counts_its_output_on_both_sides() -> None:
    case = Case()
    again = case.state([*range(8), 70])
    for token in range(71, 78):
        again.append_token(token)
    case.queue.add(again)
    assert not case.would_repeat(again)
    other = case.state([*range(8), 70, 71])
    for token in (72, 73):
        other.append_token(token)
    case.queue.note_computing(other)
    assert case.would_repeat(again)


@pytest.mark.parametrize("num_computing", [2, 200])
def test_one_look_up_for_many_computing(num_computing: int) -> None:
    case = Case()
    states = [case.state([*range(8), *[1000 + i] * 12]) for i in range(num_computing)]
    for state in states:
        case.queue.note_computing(state)
    # They differ in their next page, so each sibling meets one of them alone.
    for i in (0, num_computing - 1):
        state = case.state([*range(8), *[1000 + i] * 5])
        case.queue.add(state)
        [entry] = [entry for entry in case.queue.in_order() if entry.state is state]
        assert case.queue.would_repeat(entry)
    assert not case.waits([*range(8), *[999] * 5])


def test_who_shares_nothing_waits_for_nobody() -> None:
    case = Case()
    queue = WaitingQueue(make_policy("dfs-weight"), case.cache)
    group = SampleGroup(None, mode="off")
    states = [RequestState(case.state(range(24)).request, PAGE_SIZE, 0.0, group) for _ in range(2)]
    queue.note_computing(states[0])
    for state in states[::-1]:
        queue.add(state)
    entries = list(queue.in_order())
    assert [(entry.state, entry.matched_len) for entry in entries] == [(states[0], 0), (states[1], 0)]
    assert not any(queue.would_repeat(entry) for entry in entries)
    queue.note_inserted(states[0], range(8), 1)
    queue.forget_computing(states[0].request_id)
    queue.check_integrity()


@pytest.mark.parametrize("computing", CACHE_MODES)
@pytest.mark.parametrize("waiting", CACHE_MODES)
def test_who_waits_for_whom_by_their_use_of_the_cache(waiting: CacheMode, computing: CacheMode) -> None:
    """Only who looks into the cache waits, and only for what will be there."""
    case = Case()
    case.queue.forget_computing(case.running.request_id)
    first, second = case.state(range(24)), case.state(range(22))
    first.group, second.group = SampleGroup(None, mode=computing), SampleGroup(None, mode=waiting)
    case.queue.note_computing(first)
    case.queue.add(second)
    assert case.would_repeat(second) == (computing in ("use", "write") and waiting in ("use", "read"))
