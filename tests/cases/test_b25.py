"""Hit rates count each prompt once: unrelated prompts are 0 hits, though running requests are retracted all the time
and find their own KV again."""

import numpy as np
import pytest
from scheduling import FakeModel, RequestMaker, make_scheduler, run_all


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_unrelated_prompts_hit_nothing_and_are_counted_once(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    num_pages = 1 + 256 // page_size
    scheduler = make_scheduler(page_size=page_size, num_pages=num_pages, max_prefill_tokens=64)
    model, make = FakeModel(num_pages, page_size), RequestMaker()
    prompts = [rng.integers(0, 30_000, rng.integers(1, 120), np.int32) for _ in range(60)]
    for prompt in prompts:
        scheduler.add(make(prompt, 80))
    run_all(scheduler, model)
    scheduler.check_integrity()
    assert scheduler.cache.num_evicted_tokens > 0
    # Ids are drawn from so many that only at page_size 1 two prompts may begin alike, which the tree then says.
    firsts = [int(prompt[0]) for prompt in prompts]
    assert page_size > 1 or len(set(firsts)) == len(firsts)
    stats = scheduler.stats
    assert stats.num_retractions >= 5
    assert stats.num_cached_tokens == 0
    assert stats.num_prompt_tokens == sum(map(len, prompts))
    # Less is computed again than was retracted: that is what is found again, and no hit.
    assert stats.num_prefill_tokens > sum(map(len, prompts))
