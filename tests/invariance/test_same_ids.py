"""The same greedy ids whatever the engine does to get there: pages, chunks, company, order, eviction (float32)."""

from typing import Any

import numpy as np
import pytest
from tiny import assert_idle, dense_greedy, finish, generate, greedy, random_prompts, tiny_engine, token_ids

NUM_TOKENS = 8
PROMPTS = random_prompts(24, lens=(1, 110), num_stems=3, seed=20)
# A third of what 8 requests fill, so that prefixes are evicted all the time.
SMALL_POOL_LEN = 320


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [dense_greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_prefix_cache": False},
        {"max_prefill_tokens": 128},
        {"schedule_policy": "fcfs"},
        {"schedule_policy": "shortest-prefill-first"},
        {"partial_pages": False},
        {"page_size": 2},
        {"page_size": 16},
    ],
    ids=["chunked", "cache_off", "whole", "fcfs", "shortest_first", "whole_pages", "page_size_2", "page_size_16"],
)
def test_batched_twice(fields: dict[str, Any], expected: list[list[int]]) -> None:
    """Cold, and from what the first round left in the cache."""
    engine = tiny_engine(**fields)
    for _ in range(2):
        outputs = generate(engine, PROMPTS, greedy(NUM_TOKENS))
        assert token_ids(outputs) == expected
    assert_idle(engine)
    for output in outputs:
        most = len(output.prompt_token_ids) - 1 if fields.get("enable_prefix_cache", True) else 0
        assert output.cached_tokens == (most if fields.get("partial_pages", True) else most // 4 * 4)


def test_alone(expected: list[list[int]]) -> None:
    engine = tiny_engine()
    outputs = [generate(engine, [prompt], greedy(NUM_TOKENS))[0] for prompt in PROMPTS]
    assert token_ids(outputs) == expected
    assert sum(output.cached_tokens for output in outputs) > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_any_order(seed: int, expected: list[list[int]]) -> None:
    engine = tiny_engine()
    order = np.random.default_rng(seed).permutation(len(PROMPTS))
    outputs = generate(engine, [PROMPTS[i] for i in order], greedy(NUM_TOKENS))
    assert token_ids(outputs) == [expected[i] for i in order]


def test_requests_that_come_one_by_one_while_others_run(expected: list[list[int]]) -> None:
    engine = tiny_engine()
    request_ids, outputs = [], {}
    for prompt in PROMPTS:
        request_ids.append(engine.add_request(prompt, greedy(NUM_TOKENS)))
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    outputs |= finish(engine)
    assert token_ids([outputs[request_id] for request_id in request_ids]) == expected


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_after_eviction(page_size: int, expected: list[list[int]]) -> None:
    engine = tiny_engine(page_size=page_size, num_pages=1 + SMALL_POOL_LEN // page_size)
    before = engine.stats()
    for _ in range(2):
        assert token_ids(generate(engine, PROMPTS, greedy(NUM_TOKENS))) == expected
    after = engine.stats()
    assert after.num_evicted_tokens - before.num_evicted_tokens > SMALL_POOL_LEN
    assert after.num_cached_tokens > before.num_cached_tokens
    assert_idle(engine)


def test_with_aborts_in_between(expected: list[list[int]]) -> None:
    """Every third request is aborted at some step, some of them in the middle of their prompt."""
    engine = tiny_engine(num_pages=1 + SMALL_POOL_LEN // 4)
    rng = np.random.default_rng(3)
    request_ids = [engine.add_request(prompt, greedy(NUM_TOKENS)) for prompt in PROMPTS]
    aborted_at = {request_id: rng.integers(0, 25) for request_id in request_ids[::3]}
    outputs = {}
    for step in range(1000):
        for request_id, at in aborted_at.items():
            if at == step and (output := engine.abort(request_id)) is not None:
                outputs[request_id] = output
                engine.check_integrity()
        if not engine.has_unfinished():
            break
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    ends = [outputs[request_id].outputs[0] for request_id in request_ids]
    assert "abort" in {end.finish_reason for end in ends}
    for end, ids in zip(ends, expected, strict=True):
        assert end.token_ids == ids[: len(end.token_ids)]
        assert end.finish_reason == "abort" or len(end.token_ids) == NUM_TOKENS
    assert_idle(engine)
