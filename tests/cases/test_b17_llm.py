"""A prompt below the context limit but above the pool: an error for it alone, and the next one is served."""

import dataclasses

from tiny import TINY, dense_greedy, greedy, module_of, random_weights, tiny_llama
from tiny_llm import new_llm

LONG_CONTEXT = dataclasses.replace(TINY, max_position_embeddings=4096)


def test_the_long_one_is_refused_and_the_short_one_served() -> None:
    module = module_of(LONG_CONTEXT, random_weights(LONG_CONTEXT))
    short = [1, 2, 3, 4, 5]
    with new_llm(module, page_size=16, num_pages=49, max_model_len=4096) as llm:
        refused, served = llm.generate([[1] * 1002, short], greedy(16, ignore_eos=True))
        assert refused.outputs == []
        assert refused.error is not None
        assert "1002 prompt + 16 output tokens needs 64 pages" in refused.error
        assert "the pool has 48" in refused.error
        assert served.outputs[0].token_ids == dense_greedy(short, 16, tiny_llama())
