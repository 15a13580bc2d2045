"""Greedy ids are the same cold, warm and without the cache, alone and eight at a time, in float32."""

import numpy as np
import pytest
from tiny import dense_greedy, generate, greedy, random_prompts, tiny_engine, token_ids

NUM_TOKENS = 4


def all_ways(prompts: list[np.ndarray]) -> dict[str, list[list[int]]]:
    """The ids by each way to run the prompts."""
    cached, uncached = tiny_engine(), tiny_engine(enable_prefix_cache=False)
    ways = {}
    for name, engine in (("cold", cached), ("warm", cached), ("off", uncached)):
        ways[f"{name}, eight"] = token_ids(generate(engine, prompts, greedy(NUM_TOKENS)))
    cached.flush_cache()
    for name, engine in (("cold", cached), ("warm", cached), ("off", uncached)):
        one_by_one = [generate(engine, [prompt], greedy(NUM_TOKENS))[0] for prompt in prompts]
        ways[f"{name}, alone"] = token_ids(one_by_one)
        if name == "warm":
            for output in one_by_one:
                prompt_len = len(output.prompt_token_ids)
                # A thousand prompts do not all stay in the pool: then any of them may be gone again.
                least = (prompt_len - 1) // 4 * 4 if len(prompts) == 100 else 0
                assert least <= output.cached_tokens <= prompt_len - 1
    return ways


def test_a_hundred_prompts_of_five_stems() -> None:
    prompts = random_prompts(100, lens=(1, 100), num_stems=5, seed=30)
    expected = [dense_greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert {name: ids == expected for name, ids in all_ways(prompts).items()} == dict.fromkeys(
        ("cold, eight", "warm, eight", "off, eight", "cold, alone", "warm, alone", "off, alone"), True
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_prompts_of_twenty_stems() -> None:
    prompts = random_prompts(1000, lens=(1, 100), num_stems=20, seed=31)
    ways = all_ways(prompts)
    first = ways["off, alone"]
    assert len({tuple(ids) for ids in first}) > 900
    for name, ids in ways.items():
        differing = [i for i in range(1000) if ids[i] != first[i]]
        assert not differing, f"{name}: prompts {differing} differ"
