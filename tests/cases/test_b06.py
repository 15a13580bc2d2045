"""Pages do not vanish with long pages, partial tails and aborts."""

import random

import pytest
from cache_driver import CacheDriver


@pytest.mark.parametrize(("page_size", "num_pages"), [(64, 60), (7, 300)])
def test_idle_pool_is_whole(page_size: int, num_pages: int):
    rng = random.Random(6)
    driver = CacheDriver(page_size, num_pages)
    stem = [rng.randrange(1000) for _ in range(150)]
    num_started = 0
    while num_started < 500 or driver.running:
        if num_started < 500 and len(driver.running) < 6:
            shared = stem[: rng.randint(0, 150)]
            prompt = (shared + [rng.randrange(1000) for _ in range(200)])[: rng.randint(1, 200)]
            output = [rng.randrange(1000) for _ in range(rng.randint(1, 80))]
            num_started += driver.start(prompt, output, rng.choice([None, "a"])) is not None
        request = rng.choice(driver.running)
        if rng.random() < 0.05 or not driver.compute(request, rng.choice([1, 16, 100])):
            driver.abort(request)
        elif request.computed_len == len(request.ids):
            driver.finish(request)
        elif rng.random() < 0.5:
            driver.commit(request)
        if num_started % 25 == 0:
            driver.audit()
    driver.audit()
    assert driver.cache.tree.protected_size == 0
    assert driver.cache.num_available == num_pages - 1
    assert driver.cache.tree.total_size > 0
    driver.cache.reset()
    assert driver.cache.pool.num_free == num_pages - 1
    driver.audit()
