"""The same greedy ids through interpreted kernels in a pool that is too small: cached, chunked, evicted, retracted."""

import pytest
from tiny import assert_idle, dense_greedy, generate, greedy, random_prompts, tiny_engine, token_ids

NUM_TOKENS = 24
PROMPTS = random_prompts(12, lens=(1, 90), num_stems=2, seed=23)


@pytest.mark.parametrize("mixed_steps", [False, True])
def test_through_gpu_kernels(mixed_steps: bool) -> None:
    engine = tiny_engine(attention_backend="pallas_interpret", mixed_steps=mixed_steps, num_pages=37)
    before = engine.stats()
    expected = [dense_greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for _ in range(2):
        assert token_ids(generate(engine, PROMPTS, greedy(NUM_TOKENS))) == expected
    after = engine.stats()
    assert after.num_cached_tokens > before.num_cached_tokens
    assert after.num_evicted_tokens > before.num_evicted_tokens
    assert after.num_retractions > before.num_retractions
    assert_idle(engine)


@pytest.mark.slow
def test_through_tpu_kernels_in_short() -> None:
    """Prefill and decode with the write in passing, and a second time from the cache."""
    engine = tiny_engine(attention_backend="pallas_tpu_interpret", page_size=8, num_pages=61)
    prompts = PROMPTS[:3]
    expected = [dense_greedy(prompt, 3) for prompt in prompts]
    for _ in range(2):
        outputs = generate(engine, prompts, greedy(3))
        assert token_ids(outputs) == expected
    assert sum(output.cached_tokens for output in outputs) > 0
