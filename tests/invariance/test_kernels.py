"""The same greedy ids through interpreted kernels in a pool that is too small: cached, chunked, evicted, retracted."""

import pytest
from tiny import assert_idle, dense_greedy, generate, greedy, random_prompts, tiny_engine, token_ids

NUM_TOKENS = 24
PROMPTS = random_prompts(12, lens=(1, 90), num_stems=2, seed=23)


@pytest.mark.parametrize("mixed_steps", [False, True])
@pytest.mark.parametrize("backend", ["pallas_interpret"])
def test_through_kernels(backend: str, mixed_steps: bool) -> None:
    engine = tiny_engine(attention_backend=backend, mixed_steps=mixed_steps, num_pages=37)
    before = engine.stats()
    expected = [dense_greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for _ in range(2):
        assert token_ids(generate(engine, PROMPTS, greedy(NUM_TOKENS))) == expected
    after = engine.stats()
    assert after.num_cached_tokens > before.num_cached_tokens
    assert after.num_evicted_tokens > before.num_evicted_tokens
    assert after.num_retractions > before.num_retractions
    assert_idle(engine)
