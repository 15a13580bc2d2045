"""Log-probabilities of a cached prompt: KV is cached, logits are not."""

import numpy as np
from tiny import VOCAB_SIZE, generate, greedy, tiny_engine


def test_a_prompt_of_40_tokens_twice() -> None:
    engine = tiny_engine()
    prompt = np.random.default_rng(31).integers(0, VOCAB_SIZE, 40).astype(np.int32)
    first, second = (generate(engine, [prompt], greedy(4, prompt_logprobs=3))[0] for _ in range(2))
    assert second.cached_tokens == 39
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(second.prompt_logprobs) == 40
    assert first.prompt_logprobs[0] is second.prompt_logprobs[0] is None
    for place in range(1, 40):
        entry, again = first.prompt_logprobs[place], second.prompt_logprobs[place]
        assert entry is not None
        assert again is not None
        assert list(entry) == list(again)
        assert next(iter(entry)) == prompt[place]
        assert all(abs(entry[token].logprob - again[token].logprob) < 1e-5 for token in entry)
    # As a prompt that nobody asked about before: all of it is computed.
    engine.flush_cache()
    generate(engine, [prompt], greedy(1))
    [third] = generate(engine, [prompt], greedy(1, prompt_logprobs=3))
    assert third.cached_tokens == 0
