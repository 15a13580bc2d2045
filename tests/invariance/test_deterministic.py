"""deterministic=True: the same tokens and bitwise the same log-probabilities, whatever the engine does to get there."""

from typing import Any

import jax
import numpy as np
import pytest
from tiny import SMALL, TINY, assert_idle, finish, generate, greedy, module_of, random_prompts, random_weights, tiny_engine

from radix_jax import Engine, EngineConfig, RequestOutput, SamplingParams

NUM_TOKENS = 12
PROMPTS = random_prompts(20, lens=(1, 110), num_stems=3, seed=40)
SAMPLINGS = [
    SamplingParams(temperature=(0.0, 1.0, 0.7)[i % 3], top_p=0.95, seed=i, max_tokens=NUM_TOKENS, logprobs=5)
    for i in range(len(PROMPTS))
]
BASE = {"deterministic": True}


def bits(output: RequestOutput) -> list[Any]:
    """Tokens, and each log-probability to the last bit."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert completion.sampling_logprobs is not None
    entries = [
        [(token_id, np.float32(entry.logprob).tobytes(), entry.rank) for token_id, entry in of_token.items()]
        for of_token in completion.logprobs
    ]
    return [completion.token_ids, entries, np.asarray(completion.sampling_logprobs, np.float32).tobytes()]


@pytest.fixture(scope="module")
def alone() -> list[list[Any]]:
    """Each request by itself, without a cache."""
    engine = tiny_engine(**BASE, enable_prefix_cache=False)
    return [bits(generate(engine, [prompt], sampling)[0]) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_prefix_cache": False},
        {"page_size": 1, "num_pages": 6400},
        {"page_size": 16, "num_pages": 400},
        {"page_size": 64, "num_pages": 100},
        {"partial_pages": False},
        {"max_prefill_tokens": 20},
        {"mixed_steps": True},
        {"overlap": False},
        {"schedule_policy": "random"},
        {"num_pages": 81},
        {"num_pages": 81, "mixed_steps": True},
    ],
    ids=lambda fields: "-".join(f"{name}={value}" for name, value in fields.items()) or "cached",
)
def test_together_twice(fields: dict[str, Any], alone: list[list[Any]]) -> None:
    engine = tiny_engine(**BASE | fields)
    before = engine.stats()
    for _ in range(2):
        assert [bits(output) for output in generate(engine, PROMPTS, SAMPLINGS)] == alone
    after = engine.stats()
    if fields.get("enable_prefix_cache", True):
        assert after.num_cached_tokens > before.num_cached_tokens
    if fields.get("num_pages") == 81:
        assert after.num_evicted_tokens > before.num_evicted_tokens
    assert_idle(engine)
