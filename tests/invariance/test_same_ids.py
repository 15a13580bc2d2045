"""The same greedy ids whatever the engine does to get there: pages, chunks, company, order, eviction (float32).

All of it twice: through XLA attention, and through the GPU kernels in interpret mode, which takes minutes;
test_kernels.py has a short form of that.
"""

from typing import Any

import numpy as np
import pytest
from tiny import SMALL, assert_idle, dense_greedy, finish, generate, greedy, random_prompts, tiny_engine, token_ids

NUM_TOKENS = 8
PROMPTS = random_prompts(24, lens=(1, 110), num_stems=3, seed=20)
# A third of what 8 requests fill, so that prefixes are evicted all the time.
SMALL_POOL_LEN = 320


@pytest.fixture(params=["xla", pytest.param("pallas_interpret", marks=pytest.mark.slow)], autouse=True)
def attention_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine of this module runs on each."""
    monkeypatch.setitem(SMALL, "attention_backend", request.param)


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
        {"overlap": False},
        {"mixed_steps": True},
        {"mixed_steps": True, "overlap": False, "max_prefill_tokens": 128},
        {"max_consecutive_prefills": 1},
        {"schedule_policy": "dfs-weight"},
        {"schedule_policy": "hrrn"},
        {"schedule_policy": "random"},
    ],
    ids=lambda fields: "-".join(f"{name}={value}" for name, value in fields.items()) or "chunked",
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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mixed_steps", [True, False])
def test_after_retraction(overlap: bool, mixed_steps: bool) -> None:
    """Long outputs of requests that are let in for a part of them, in a pool that can't hold them all."""
    engine = tiny_engine(page_size=2, num_pages=61, overlap=overlap, mixed_steps=mixed_steps)
    prompts = random_prompts(8, lens=(1, 20), num_stems=2, seed=21)
    before = engine.stats()
    outputs = generate(engine, prompts, greedy(60))
    assert token_ids(outputs) == [dense_greedy(prompt, 60) for prompt in prompts]
    assert engine.stats().num_retractions > before.num_retractions
    assert_idle(engine)


def test_priorities_take_places_and_change_no_token(expected: list[list[int]]) -> None:
    engine = tiny_engine(max_running_requests=2)
    before = engine.stats()
    request_ids, outputs = [], {}
    for place, prompt in enumerate(PROMPTS):
        request_ids.append(engine.add_request(prompt, greedy(NUM_TOKENS), priority=place % 4))
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    outputs |= finish(engine)
    assert token_ids([outputs[request_id] for request_id in request_ids]) == expected
    assert engine.stats().num_retractions > before.num_retractions
    assert_idle(engine)


@pytest.mark.parametrize("after", range(14))
@pytest.mark.parametrize("then", ["resume", "abort"])
def test_retracted_at_any_point(after: int, then: str) -> None:
    """While the prompt is computed in chunks, at the first token, and later."""
    engine = tiny_engine(overlap=False, max_prefill_tokens=16)
    engine.flush_cache()
    prompt = random_prompts(1, lens=(70, 71), seed=22)[0]
    request_id = engine.add_request(prompt, greedy(10))
    for _ in range(after):
        engine.step()
    scheduler = engine._scheduler
    if request_id in scheduler.states and scheduler._running.get(request_id) is not None:
        scheduler._retract(scheduler.states[request_id])
        engine.check_integrity()
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)
    if then == "abort":
        engine.abort(request_id)
    elif request_id in scheduler.states:
        [output] = finish(engine).values()
        assert output.outputs[0].token_ids == dense_greedy(prompt, 10)
        assert output.cached_tokens == 0, "what it finds of its own is no hit"
    assert_idle(engine)
