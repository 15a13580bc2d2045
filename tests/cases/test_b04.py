"""Thousands of random operations: each page keeps one owner and the counters equal a recount, after every one."""

import random

import pytest
from cache_driver import CacheDriver

from radix_jax.cache import HandleError

NUM_OPERATIONS = 5_000


def _random_step(driver: CacheDriver, rng: random.Random) -> str:
    """One operation on a request, or on the cache beside the requests; returns which."""
    choices = ["start"] * 3 + ["look", "evict"]
    if driver.running:
        choices += ["compute"] * 4 + ["commit"] * 3 + ["finish", "abort"]
    step = rng.choice(choices)
    namespace = rng.choice([None, "tenant"])
    # Few stems and few tokens, so that requests share prefixes of all lengths.
    ids = [rng.choice([5, 5, 5, 6]) for _ in range(rng.randint(1, 3 * driver.page_size + 4))]
    if step == "start" and len(driver.running) < 5:
        driver.start(ids, [rng.choice([5, 6]) for _ in range(rng.randint(1, 8))], namespace)
    elif step == "look":
        match = driver.cache.match_prefix(ids, namespace)
        driver.cache.lock(match.handle)
        driver.cache.unlock(match.handle)
        with pytest.raises(HandleError):
            driver.cache.unlock(match.handle)
    elif step == "evict":
        driver.cache.free(driver.cache.tree.evict(rng.randint(1, 2 * driver.page_size)))
    elif step in ("compute", "commit", "finish", "abort"):
        request = rng.choice(driver.running)
        if step == "compute":
            driver.compute(request, rng.randint(1, driver.page_size + 2))
        else:
            getattr(driver, step)(request)
    return step


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 28), (4, 20), (16, 12)])
def test_random_operations(page_size: int, num_pages: int):
    driver = CacheDriver(page_size, num_pages)
    rng = random.Random(page_size)
    done = {_random_step_and_audit(driver, rng) for _ in range(NUM_OPERATIONS)}
    assert done == {"start", "look", "evict", "compute", "commit", "finish", "abort"}
    assert driver.cache.num_evicted_tokens > 0
    while driver.running:
        driver.abort(driver.running[0])
    driver.audit()
    driver.cache.reset()
    assert driver.cache.pool.num_free == num_pages - 1


def _random_step_and_audit(driver: CacheDriver, rng: random.Random) -> str:
    step = _random_step(driver, rng)
    driver.audit()
    return step
