"""PrefixCache in random walks of simulated requests: no page is lost, shared by accident, or read with another's KV."""

import pytest
from cache_driver import CacheDriver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from radix_jax.cache import HandleError

tokens = st.integers(1, 2)  # few, so that requests share prefixes of all lengths
places = st.integers(0, 10**6)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Requests that start, compute, commit, finish and abort in any order, in a pool that is too small for all."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        super().__init__()
        self.driver = CacheDriver(page_size, num_pages)

    def pick(self, place: int):
        return self.driver.running[place % len(self.driver.running)]

    @precondition(lambda self: len(self.driver.running) < 6)
    @rule(
        pages=st.lists(tokens, max_size=4),
        tail=st.lists(tokens, min_size=1, max_size=5),
        output=st.lists(tokens, max_size=6),
        namespace=st.sampled_from([None, "a"]),
    )
    def start(self, pages, tail, output, namespace):
        prompt = [token for token in pages for _ in range(self.driver.page_size)] + tail
        cached_len = self.driver.cache.match_len(prompt[:-1], namespace)
        request = self.driver.start(prompt, output, namespace)
        if request is not None:
            assert request.handle.cached_len == cached_len < len(prompt)
            donor_len = 0 if request.donor is None else request.donor.donor_len
            assert cached_len + donor_len < len(prompt)

    @precondition(lambda self: self.driver.running)
    @rule(place=places, num_tokens=st.integers(1, 40))
    def compute(self, place, num_tokens):
        self.driver.compute(self.pick(place), num_tokens)

    @precondition(lambda self: self.driver.running)
    @rule(place=places, up_to=st.none() | st.integers(0, 40))
    def commit(self, place, up_to):
        request = self.pick(place)
        held_len = request.handle.cached_len
        self.driver.commit(request, up_to)
        assert request.handle.cached_len >= held_len
        if up_to is None:
            page_size = self.driver.page_size
            cached_len = self.driver.cache.match_len(request.ids[: request.computed_len], request.namespace)
            assert cached_len == request.handle.cached_len == request.computed_len // page_size * page_size

    @precondition(lambda self: self.driver.running)
    @rule(place=places)
    def finish(self, place):
        request = self.pick(place)
        self.driver.finish(request)
        page_size = self.driver.page_size
        cached_len = self.driver.cache.match_len(request.ids, request.namespace)
        assert cached_len >= request.computed_len // page_size * page_size

    @precondition(lambda self: self.driver.running)
    @rule(place=places)
    def abort(self, place):
        self.driver.abort(self.pick(place))

    @rule(num_tokens=st.integers(0, 40))
    def evict(self, num_tokens):
        self.driver.cache.free(self.driver.cache.tree.evict(num_tokens))

    @rule()
    def reset(self):
        cache = self.driver.cache
        if cache.num_protected:
            with pytest.raises(HandleError):
                cache.reset()
        else:
            cache.reset()
            assert cache.tree.total_size == cache.num_evictable == 0

    @invariant()
    def audit(self):
        self.driver.audit()

    def teardown(self):
        while self.driver.running:
            self.driver.abort(self.driver.running[0])
        self.driver.audit()
        cache = self.driver.cache
        assert cache.num_available == cache.pool.num_pages - 1
        cache.reset()
        assert cache.pool.num_free == cache.pool.num_pages - 1


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 40), (2, 24), (4, 16), (16, 12)])
def test_requests_share_pages_and_lose_none(page_size: int, num_pages: int):
    run_state_machine_as_test(
        lambda: PrefixCacheMachine(page_size, num_pages),
        settings=settings(max_examples=40, stateful_step_count=40),
    )
