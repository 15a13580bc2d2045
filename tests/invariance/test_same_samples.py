"""The same samples whatever the engine does to get there: each as if it were a request of its own (float32)."""

from typing import Any

import numpy as np
import pytest
from tiny import assert_idle, dense_drawn, drawn, finish, generate, random_prompts, samples, tiny_engine

from radix_jax import Engine, RequestOutput, SamplingParams
from radix_jax.request import FinishAt, FinishCheck

NUM_TOKENS = 9
PROMPTS = random_prompts(9, lens=(1, 60), num_stems=2, seed=60)
NUMS_SAMPLES = (1, 4, 2, 7, 1, 3, 5, 1, 2)
# Sample i of request r is ended by a check after so many tokens, unless the length ends it before.
LENS = [[NUM_TOKENS - (3 * place + 2 * index) % 5 for index in range(n)] for place, n in enumerate(NUMS_SAMPLES)]


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    return [
        [dense_drawn(PROMPTS[place], num_tokens, place, index) for index, num_tokens in enumerate(lens)]
        for place, lens in enumerate(LENS)
    ]


def params_of(place: int) -> SamplingParams:
    return drawn(NUM_TOKENS, place, n=NUMS_SAMPLES[place])


def check_of(place: int) -> FinishCheck:
    """Ends each sample where LENS says."""
    num_told = [0] * NUMS_SAMPLES[place]

    def check(index: int, new_ids: list[int]) -> FinishAt | None:
        num_left = LENS[place][index] - num_told[index]
        num_told[index] += len(new_ids)
        return FinishAt(num_left, "told to") if num_left <= len(new_ids) else None

    return check


def run(engine: Engine, order: list[int], steps_between: int = 0) -> dict[int, RequestOutput]:
    """The last output of each prompt, by its place."""
    places, last = {}, {}
    for place in order:
        places[engine.add_request(PROMPTS[place], params_of(place), finish_check=check_of(place))] = place
        for _ in range(steps_between):
            last |= {output.request_id: output for output in engine.step()}
            engine.check_integrity()
    last |= finish(engine)
    assert_idle(engine)
    return {place: last[request_id] for request_id, place in places.items()}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_prefix_cache": False},
        {"enable_prefix_cache": False, "max_prefill_tokens": 16, "max_running_requests": 3},
        {"enable_prefix_cache": False, "page_size": 2, "num_pages": 61},
        {"max_prefill_tokens": 16},
        {"partial_pages": False, "page_size": 16},
        {"overlap": False},
        {"mixed_steps": True},
        {"mixed_steps": True, "overlap": False, "max_prefill_tokens": 16},
        {"max_running_requests": 2},
        {"page_size": 2, "num_pages": 61},
        {"page_size": 2, "num_pages": 61, "mixed_steps": True, "overlap": False},
        {"schedule_policy": "dfs-weight"},
        {"schedule_policy": "random"},
    ],
    ids=lambda fields: "-".join(f"{name}={value}" for name, value in fields.items()) or "plain",
)
def test_together_and_again(fields: dict[str, Any], expected: list[list[list[int]]]) -> None:
    """Cold, and from what the first round left in the cache."""
    engine = tiny_engine(**fields)
    before = engine.stats()
    for _ in range(2):
        outputs = run(engine, list(range(len(PROMPTS))))
        assert [samples(outputs[place]) for place in range(len(PROMPTS))] == expected
    after = engine.stats()
    if "num_pages" in fields:
        assert after.num_retractions + after.num_evicted_tokens > before.num_retractions + before.num_evicted_tokens
    assert after.num_prompt_tokens - before.num_prompt_tokens == 2 * sum(map(len, PROMPTS))


@pytest.mark.parametrize("overlap", [True, False])
def test_in_any_company(overlap: bool, expected: list[list[list[int]]]) -> None:
    """One by one while others run, in another order."""
    order = np.random.default_rng(0).permutation(len(PROMPTS)).tolist()
    outputs = run(tiny_engine(overlap=overlap), order, steps_between=2)
    assert [samples(outputs[place]) for place in range(len(PROMPTS))] == expected


def test_alone(expected: list[list[list[int]]]) -> None:
    engine = tiny_engine()
    for place in range(len(PROMPTS)):
        assert samples(run(engine, [place])[place]) == expected[place]


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_after_retraction(overlap: bool, enable_prefix_cache: bool) -> None:
    """Long outputs in a pool that can't hold those of all samples."""
    engine = tiny_engine(page_size=2, num_pages=61, overlap=overlap, enable_prefix_cache=enable_prefix_cache)
    prompts = random_prompts(2, lens=(4, 12), num_stems=1, seed=61)
    before = engine.stats()
    outputs = generate(engine, prompts, [drawn(30, seed, n=5) for seed in range(2)])
    assert [samples(output) for output in outputs] == [
        [dense_drawn(prompt, 30, seed, index) for index in range(5)] for seed, prompt in enumerate(prompts)
    ]
    assert engine.stats().num_retractions > before.num_retractions
    assert_idle(engine)
