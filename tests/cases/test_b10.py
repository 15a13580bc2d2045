"""A prompt that is cached in full: its last token is computed all the same, and the output is that of before."""

import pytest
from tiny import VOCAB_SIZE, dense_greedy, generate, greedy, tiny_engine

LENS = (1, 4, 5, 16, 17, 32, 33)
CACHED = {1: (0, 3, 4, 15, 16, 31, 32), 4: (0, 0, 4, 12, 16, 28, 32), 16: (0, 0, 0, 0, 16, 16, 32)}


@pytest.mark.parametrize("partial_pages", [False, True], ids=["whole_pages", "partial_pages"])
@pytest.mark.parametrize("page_size", CACHED)
def test_cached_tokens_leave_one_to_compute(page_size: int, partial_pages: bool) -> None:
    engine = tiny_engine(page_size=page_size, num_pages=1 + 320 // page_size, partial_pages=partial_pages)
    for prompt_len, whole_pages in zip(LENS, CACHED[page_size], strict=True):
        cached_tokens = prompt_len - 1 if partial_pages else whole_pages
        prompt = [(prompt_len * 37 + place * 11) % VOCAB_SIZE for place in range(prompt_len)]
        [first] = generate(engine, [prompt], greedy(3))
        [second] = generate(engine, [prompt], greedy(3))
        assert first.cached_tokens == 0
        assert second.cached_tokens == cached_tokens <= prompt_len - 1
        assert second.outputs[0].token_ids == first.outputs[0].token_ids == dense_greedy(prompt, 3)
