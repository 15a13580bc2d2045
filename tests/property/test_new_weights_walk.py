"""Random requests, aborts, steps and updates of the weights, in small pools: at any time each request's KV is what the
weights of the time computed, token by token, whoever it was shared with."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from scheduling import FakeModel, RequestMaker, kv_of, make_scheduler, samples_of

from radix_jax.cache import PagePool, PrefixCache, RadixTree, of_weights
from radix_jax.config import SCHEDULE_POLICIES
from radix_jax.plan import StepPlan, StepRow
from radix_jax.scheduler import RequestState

WORDS = [np.arange(10 * i, 10 * i + length) for i, length in enumerate((1, 3, 4, 9, 14))]


@dataclass
class Told:
    """What is known of a sample. kv_versions: of the weights that computed each token's KV since it was let in.
    num_retractions: by then. versions: of the weights that sampled each output token."""

    state: RequestState
    kv_versions: list[int] = field(default_factory=list)
    num_retractions: int = -1
    versions: list[int] = field(default_factory=list)


class Walk:
    """One scheduler with its model, and the oracle: a dict of what is known of each sample."""

    def __init__(self, seed: int):
        self.rng = rng = np.random.default_rng(seed)
        self.page_size, num_pages = int(rng.choice([1, 2, 4])), int(rng.integers(16, 40))
        self.overlap = bool(rng.integers(2))
        tree = RadixTree(self.page_size, rng.choice(["lru", "lfu", "slru"]), partial_pages=bool(rng.integers(2)))
        self.caches = bool(rng.random() < 0.75)
        self.scheduler = make_scheduler(
            page_size=self.page_size,
            max_running_requests=int(rng.integers(1, 6)),
            max_prefill_tokens=self.page_size * int(rng.integers(1, 5)) + 1,
            schedule_policy=str(rng.choice(SCHEDULE_POLICIES)),
            enable_prefix_cache=self.caches,
            cache=PrefixCache(tree, PagePool(num_pages)),
            limits={"mixed_steps": bool(rng.integers(2))},
        )
        self.num_usable_pages = num_pages - 1
        self.model, self.make = FakeModel(num_pages, self.page_size), RequestMaker()
        self.told: dict[str, Told] = {}
        self.in_flight: list[tuple[StepPlan, np.ndarray, int]] = []
        self.version = 0
        self.num_shared_tokens = self.num_straddlers = 0

    def add(self) -> None:
        prompt = np.concatenate([WORDS[i] for i in self.rng.integers(0, len(WORDS), self.rng.integers(1, 4))])
        max_tokens = int(self.rng.integers(1, 14))
        if -(-(len(prompt) + max_tokens - 1) // self.page_size) > self.num_usable_pages or len(self.told) > 9:
            return
        priority = int(self.rng.choice([0, 0, 0, 1]))
        request = self.make(prompt, max_tokens, stop_ids=[int(self.rng.integers(60))], priority=priority)
        for state in self.scheduler.add_samples(samples_of(request, int(self.rng.choice([1, 1, 3])))):
            self.told[state.request_id] = Told(state)

    def abort(self) -> None:
        if self.told:
            name = str(self.rng.choice(list(self.told)))
            self.scheduler.abort(name)
            self.check_end(self.told.pop(name))

    def plan(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            return
        tokens = self.model.run(plan)
        for row in plan.rows:
            self.check_row(row)
        self.in_flight.append((plan, tokens, self.version))

    def check_row(self, row: StepRow) -> None:
        """All KV of the request, old and new, is what its oracle says."""
        told = self.told.get(row.request.request_id)
        if told is None:
            return
        state = told.state
        if told.num_retractions != state.num_retractions:  # let in since
            told.num_retractions = state.num_retractions
            told.kv_versions = [self.version] * row.start
            self.num_shared_tokens += row.start
        assert row.start == len(told.kv_versions)
        told.kv_versions += [self.version] * (row.end - row.start)
        ids = state.tokens[: row.end]
        known = min(row.end, state.num_tokens)  # the last id may be on the device alone
        kv = kv_of(ids[:known], 0, np.uint64(0), np.array(told.kv_versions[:known], np.uint64))
        np.testing.assert_array_equal(self.model.kv_in(row.pages, known), kv)

    def commit(self) -> None:
        plan, tokens, version = self.in_flight.pop(0)
        names = [row.request.request_id for row in plan.rows]
        changed = self.scheduler.commit(plan, tokens)
        for state in changed:
            told = self.told[state.request_id]
            told.versions.append(version)
            assert state.output_ids[-1] == tokens[names.index(state.request_id)]
            if state.finish_reason is not None:
                self.check_end(self.told.pop(state.request_id))

    def check_end(self, told: Told) -> None:
        starts = [*told.state.version_starts, (len(told.versions), -1)]
        given = [version for (start, version), (end, _) in itertools.pairwise(starts) for _ in range(start, end)]
        assert given == told.versions
        self.num_straddlers += len(set(told.versions)) > 1

    def step(self) -> None:
        self.plan()
        if self.in_flight and (len(self.in_flight) == 2 or not self.overlap or not self.rng.integers(3)):
            self.commit()

    def update(self) -> None:
        while self.in_flight:
            self.commit()
        on_update = self.rng.choice(["continue", "continue", "restart", "abort"])
        begun = {
            name
            for name, told in self.told.items()
            if told.versions or self.scheduler.explain(name).status == "running"
        }
        self.version += 1
        ended = {state.request_id for state in self.scheduler.update_weights(self.version, on_update)}
        self.model.weight_version = self.version
        assert ended <= self.told.keys()
        if on_update == "abort":
            assert begun <= ended
        else:
            assert not ended
        for name in ended:
            self.check_end(self.told.pop(name))
        if on_update == "restart":
            assert self.scheduler.num_running == 0
            for name in begun:
                self.told[name] = Told(self.told[name].state)
        cache = self.scheduler.cache
        assert cache.num_evictable == 0, "nothing of the old weights waits to be evicted"
        assert not cache.snapshot().tails

    def check(self) -> None:
        self.scheduler.check_integrity()
        snapshot = self.scheduler.cache.snapshot()
        namespaces = {node.node_id: node.namespace for node in snapshot.nodes}
        unlocked = [node.node_id for node in snapshot.nodes if node.state != "root" and node.num_locks == 0]
        if self.caches:
            for node_id in (*unlocked, *(tail.parent_id for tail in snapshot.tails if tail.parent_id is not None)):
                assert namespaces[node_id] == of_weights(None, self.version)

    def finish(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_unfinished:
                break
            self.step()
            self.check()
        while self.in_flight:
            self.commit()
        assert not self.told
        cache = self.scheduler.cache
        assert cache.num_protected == 0
        assert cache.num_available == self.num_usable_pages
        self.check()


def test_no_request_uses_kv_of_weights_that_were_gone_when_it_began() -> None:
    num_shared_tokens = num_straddlers = num_retractions = 0
    for seed in range(16):
        walk = Walk(seed)
        weights = np.array([0.25, 0.05, 0.62, 0.08])
        for _ in range(60):
            [walk.add, walk.abort, walk.step, walk.update][walk.rng.choice(4, p=weights)]()
            walk.check()
        num_retractions += walk.scheduler.stats.num_retractions
        walk.finish()
        num_shared_tokens += walk.num_shared_tokens
        num_straddlers += walk.num_straddlers
    assert num_shared_tokens > 300
    assert num_straddlers > 10
    assert num_retractions > 5


@pytest.mark.parametrize("on_update", ["continue", "restart", "abort"])
def test_an_update_waits_for_the_plan_in_flight(on_update: str) -> None:
    scheduler, model = make_scheduler(), FakeModel(257, 1)
    state = scheduler.add(RequestMaker()([1, 2, 3]))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(RuntimeError, match="1 plans are in flight, of the old weights; commit them first"):
        scheduler.update_weights(1, on_update)
    scheduler.commit(plan, model.run(plan))
    scheduler.update_weights(1, on_update)
    assert (state.finish_reason == "abort") is (on_update == "abort")
