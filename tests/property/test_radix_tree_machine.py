"""RadixTree in random walks, under every policy, against an oracle that knows nothing of nodes and links."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tree_oracle import RULES
from tree_walk import OWN_RULE, Held, TreeWalk

from radix_jax.config import EVICTION_POLICIES

PAGE_SIZES = [1, 2, 4, 16]
POLICIES = [*EVICTION_POLICIES, OWN_RULE]
NAMESPACES = [None, "a", ("a", 1), ("a", True)]

# Few symbols, so that keys share prefixes; lengths in pages and a tail that is cut to less than a page.
keys = st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 15))
namespaces = st.sampled_from(NAMESPACES)
places = st.integers(0, 10**6)


def ids_of(symbols: list[int], tail: int, page_size: int) -> list[int]:
    """Pages that differ in one token only, at a place of their own, so that keys part inside of pages too."""
    ids: list[int] = []
    for symbol in [*symbols, 1]:
        page = [7] * page_size
        page[(symbol * 5) % page_size] = 100 + symbol
        ids += page
    return ids[: len(symbols) * page_size + tail % page_size]


class RadixTreeMachine(RuleBasedStateMachine):
    """Every operation, right and wrong, on one tree."""

    def __init__(self, page_size: int, policy: str) -> None:
        super().__init__()
        self.walk = TreeWalk(page_size, policy)

    def ids(self, key: tuple[list[int], int]) -> list[int]:
        return ids_of(*key, self.walk.page_size)

    def held(self, place: int) -> Held:
        return self.walk.held[place % len(self.walk.held)]

    @rule(key=keys, namespace=namespaces, priority=st.integers(-1, 2), tail_page=st.booleans())
    def insert(self, key, namespace, priority, tail_page):
        self.walk.insert(self.ids(key), namespace, priority, tail_page, None)

    @rule(key=keys, namespace=namespaces)
    def match(self, key, namespace):
        self.walk.match(self.ids(key), namespace, None)

    @rule(key=keys, namespace=namespaces)
    def peek(self, key, namespace):
        self.walk.peek(self.ids(key), namespace)

    @precondition(lambda self: self.walk.held)
    @rule(place=places, more=keys)
    def match_on(self, place, more):
        held = self.held(place)
        self.walk.match(held.ids + self.ids(more), held.namespace, held)

    @precondition(lambda self: self.walk.held)
    @rule(place=places, more=keys)
    def insert_on(self, place, more):
        held = self.held(place)
        self.walk.insert(held.ids + self.ids(more), held.namespace, 0, True, held)

    @precondition(lambda self: self.walk.held)
    @rule(place=places)
    def match_on_wrongly(self, place):
        self.walk.resume_wrongly(self.held(place))

    @precondition(lambda self: self.walk.held)
    @rule(place=places)
    def lock(self, place):
        self.walk.lock(self.held(place))

    @precondition(lambda self: self.walk.held)
    @rule(place=places)
    def unlock(self, place):
        self.walk.unlock(self.held(place))

    @rule(num_pages=st.integers(0, 8), surplus=st.integers(0, 15), trim=st.booleans())
    def evict(self, num_pages, surplus, trim):
        page_size = self.walk.page_size
        self.walk.evict(num_pages * page_size + surplus % page_size, trim)

    @rule()
    def reset(self):
        self.walk.reset()

    @rule(key=keys, namespace=namespaces, ttl=st.integers(1, 5))
    def pin(self, key, namespace, ttl):
        self.walk.pin(self.ids(key), namespace, ttl)

    @precondition(lambda self: self.walk.pins)
    @rule(place=places)
    def unpin(self, place):
        self.walk.unpin(place)

    @rule(time=st.integers(0, 3))
    def expire(self, time):
        self.walk.expire(time)

    @invariant()
    def agrees(self):
        self.walk.check()


def test_the_oracle_has_a_rule_of_its_own_for_every_policy():
    assert set(RULES) == set(EVICTION_POLICIES)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_radix_tree_agrees_with_the_oracle(page_size: int, policy: str):
    run_state_machine_as_test(
        lambda: RadixTreeMachine(page_size, policy), settings=settings(max_examples=10, stateful_step_count=40)
    )


def one_random_operation(walk: TreeWalk, rng: np.random.Generator) -> None:
    ids = ids_of(rng.integers(0, 3, rng.integers(0, 7)).tolist(), int(rng.integers(16)), walk.page_size)
    namespace = NAMESPACES[rng.integers(2)]
    number = int(rng.integers(10**6))
    held = walk.held[number % len(walk.held)] if walk.held else None
    match int(rng.integers(20)):
        case 0 | 1 | 2:
            walk.insert(ids, namespace, number % 3, number % 2 == 0, None)
        case 3 | 4:
            walk.match(ids, namespace, None)
        case 5 | 6 if held and len(held.ids) < 8 * walk.page_size:
            walk.match(held.ids + ids, held.namespace, held)
        case 7 | 8 if held and len(held.ids) < 8 * walk.page_size:
            walk.insert(held.ids + ids, held.namespace, 0, False, held)
        case 9 if held:
            walk.resume_wrongly(held)
        case 10 | 11 if held:
            walk.lock(held)
        case 12 | 13 | 14 if held:
            walk.unlock(held)
        case 15 | 16:
            walk.evict(number % (9 * walk.page_size), trim=number % 5 == 0)
        case 17:
            walk.pin(ids, namespace, 1 + number % 4)
        case 18 if walk.pins and number % 2:
            walk.unpin(number)
        case 18:
            walk.expire(number % 3)
        case _ if number % 50 == 0:
            walk.reset()
        case _:
            walk.peek(ids, namespace)


def random_walk(page_size: int, policy: str, num_operations: int, seed: int) -> None:
    walk, rng = TreeWalk(page_size, policy), np.random.default_rng(seed)
    for number in range(num_operations):
        one_random_operation(walk, rng)
        # The state machine checks after each operation; a long walk, which seeks rare states, after every fifth.
        if number % 5 == 4:
            walk.check()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_200_000_random_operations(page_size: int, policy: str):
    """In 44 walks of 4,600."""
    random_walk(page_size, policy, 4_600, seed=page_size)
