"""The textbook's example through every step: S=[900,10,11,12], R1=S+[31,32], R2=S+[41,42,43], one slot a token."""

import numpy as np
from scheduling import FakeModel, RequestMaker, expected_output, make_scheduler, run_all

from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.cache.radix_tree import RadixTree

S = [900, 10, 11, 12]
R1 = [*S, 31, 32]
R2 = [*S, 41, 42, 43]
NUM_SLOTS = 10


def test_match_schedule_lock_allocate_insert_unlock_evict_free() -> None:
    tree, pool = RadixTree(page_size=1), PagePool(NUM_SLOTS + 1)
    cache = PrefixCache(tree, pool)
    scheduler = make_scheduler(
        num_pages=NUM_SLOTS + 1, max_running_requests=1, schedule_policy="shortest-prefill-first", cache=cache
    )
    model, make = FakeModel(NUM_SLOTS + 1, 1), RequestMaker()

    def sizes() -> tuple[int, int, int]:
        scheduler.check_integrity()
        return tree.evictable_size, tree.protected_size, pool.num_free

    scheduler.add(make(S, 1))
    run_all(scheduler, model)
    assert sizes() == (4, 0, 6)
    shared_slots = tree.match_prefix(S).pages.tolist()

    # R2 came first, R1 has less to do: [31, 32] + 2 against [41, 42, 43] + 3.
    second, first = make(R2, 3), make(R1, 2)
    scheduler.add(second)
    scheduler.add(first)
    assert [tree.match_len(ids[:-1]) for ids in (R1, R2)] == [4, 4]
    plan = scheduler.plan()
    assert plan is not None
    [row] = plan.rows
    assert row.request is first
    # Match: 4 of 6 tokens. Lock: S is protected. Allocate: slots for the gap only, none of them shared.
    assert (row.start, row.token_ids.tolist(), row.samples) == (4, [31, 32], True)
    assert row.pages[:4].tolist() == shared_slots
    assert not set(row.pages[4:].tolist()) & set(shared_slots)
    assert len(row.pages) == 6
    # Insert: the prompt is shared as soon as its step is planned, since steps run in order.
    assert sizes() == (0, 6, 4)
    scheduler.commit(plan, model.run(plan))
    assert sizes() == (0, 6, 4)
    # Decode: one more slot, private until the end. Then unlock: all that R1 computed can be evicted.
    plan = scheduler.plan()
    assert plan is not None
    assert plan.kind == "decode"
    assert sizes() == (0, 6, 3)
    [state] = scheduler.commit(plan, model.run(plan))
    assert state.output_ids.tolist() == expected_output(first)
    assert (state.finish_reason, state.cached_len) == ("length", 4)
    assert sizes() == (7, 0, 3)
    # R1's output hangs below its prompt, in a node of its own, and R1 below S.
    output = first.token_ids.tolist() + state.output_ids.tolist()
    assert tree.match_len(output) == 7
    assert tree.match_prefix(R1).handle.node.length == 2

    plan = scheduler.plan()
    assert plan is not None
    [row] = plan.rows
    assert row.request is second
    assert (row.start, row.token_ids.tolist()) == (4, [41, 42, 43])
    assert row.pages[:4].tolist() == shared_slots
    assert not set(row.pages[4:].tolist()) & set(shared_slots)
    assert sizes() == (3, 7, 0)
    scheduler.commit(plan, model.run(plan))
    assert sizes() == (3, 7, 0)
    # No slot is free, so R1's leaves give way, slot by slot: never S, which R2 holds.
    for num_left in (2, 1):
        plan = scheduler.plan()
        assert plan is not None
        assert plan.rows[0].pages[:4].tolist() == shared_slots
        assert not set(plan.rows[0].pages[4:].tolist()) & set(shared_slots)
        changed = scheduler.commit(plan, model.run(plan))
        assert tree.match_len(R1) == 4 + num_left
    [state] = changed
    assert state.output_ids.tolist() == expected_output(second)
    assert not scheduler.has_unfinished
    assert sizes() == (10, 0, 0)

    # Evict takes out of the tree, free gives to the pool.
    evicted = tree.evict(6)
    assert (tree.evictable_size, pool.num_free) == (4, 0)
    pool.free(evicted)
    assert sizes() == (4, 0, 6)
    assert sorted(tree.match_prefix(S).pages.tolist()) == sorted(shared_slots)
    cache.reset()
    assert sizes() == (0, 0, NUM_SLOTS)
    assert np.array_equal(np.sort(pool.allocate(NUM_SLOTS)), np.arange(1, NUM_SLOTS + 1))
