"""The reported hit rate: unrelated prompts in a pool that always evicts are 0 hits, and each prompt is counted once."""

import numpy as np
from tiny import VOCAB_SIZE, assert_idle, generate, greedy, tiny_engine


def test_unrelated_prompts_hit_nothing_and_are_counted_once() -> None:
    # With partial pages, two prompts that begin with the same id would share it.
    engine = tiny_engine(num_pages=1 + 320 // 4, partial_pages=False)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE, rng.integers(1, 100)).astype(np.int32) for _ in range(40)]
    before = engine.stats()
    outputs = generate(engine, prompts, greedy(20))
    after = engine.stats()
    num_tokens = sum(map(len, prompts))
    assert after.num_evicted_tokens - before.num_evicted_tokens > num_tokens / 2
    assert [output.cached_tokens for output in outputs] == [0] * 40
    assert after.num_cached_tokens == before.num_cached_tokens
    assert after.num_prompt_tokens - before.num_prompt_tokens == num_tokens
    # What a retracted request computes again is work, and no prompt.
    assert after.num_retractions > before.num_retractions
    assert after.num_prefill_tokens - before.num_prefill_tokens > num_tokens
    assert_idle(engine)
