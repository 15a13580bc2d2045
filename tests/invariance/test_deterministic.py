"""deterministic=True: the same tokens and bitwise the same log-probabilities, whatever the engine does to get there."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, assert_idle, finish, generate, module_of, random_prompts, random_weights, tiny_engine

from radix_jax import EngineConfig, RequestOutput, SamplingParams
from radix_jax.models.llama import Llama

NUM_TOKENS = 8
PROMPTS = random_prompts(14, lens=(1, 110), num_stems=3, seed=40)
SAMPLINGS = [
    SamplingParams(
        temperature=(0.0, 1.0, 0.7)[i % 3],
        top_p=0.95,
        seed=i,
        max_tokens=NUM_TOKENS,
        logprobs=5,
        prompt_logprobs=(None, 3)[i % 2],
    )
    for i in range(len(PROMPTS))
]
# Sums of several lengths, none of them a power of two.
WIDE = dataclasses.replace(TINY, hidden_size=200, intermediate_size=328, num_heads=6, head_dim=24, vocab_size=1000)
WAYS: list[dict[str, Any]] = [
    {},
    {"page_size": 1, "num_pages": 6400},
    {"num_pages": 61, "page_size": 2, "mixed_steps": True},
]
SLOW_WAYS: list[dict[str, Any]] = [
    {"enable_prefix_cache": False},
    {"page_size": 16, "num_pages": 400},
    {"page_size": 64, "num_pages": 100},
    {"partial_pages": False},
    {"max_prefill_tokens": 20},
    {"mixed_steps": True},
    {"overlap": False},
    {"schedule_policy": "random"},
    {"max_running_requests": 3},
    {"num_pages": 61},
]


@functools.cache
def model(dtype: str) -> Llama:
    return module_of(WIDE, jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), random_weights(WIDE)))


def bits(output: RequestOutput) -> list[Any]:
    """Tokens, and each log-probability to the last bit."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert completion.sampling_logprobs is not None
    entries = [
        [(token_id, np.float32(entry.logprob).tobytes(), entry.rank) for token_id, entry in (of_token or {}).items()]
        for of_token in completion.logprobs + (output.prompt_logprobs or [])
    ]
    return [completion.token_ids, entries, np.asarray(completion.sampling_logprobs, np.float32).tobytes()]


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(dtype: str) -> list[list[Any]]:
    """Each request by itself, without a cache."""
    engine = tiny_engine(model(dtype), deterministic=True, enable_prefix_cache=False)
    return [bits(generate(engine, [prompt], sampling)[0]) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]


@pytest.mark.parametrize(
    "fields",
    [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW_WAYS)],
    ids=lambda fields: "-".join(f"{name}={value}" for name, value in fields.items()) or "cached",
)
def test_together_twice(fields: dict[str, Any], dtype: str, alone: list[list[Any]]) -> None:
    engine = tiny_engine(model(dtype), deterministic=True, **fields)
    before = engine.stats()
    for _ in range(2):
        assert [bits(output) for output in generate(engine, PROMPTS, SAMPLINGS)] == alone
    after = engine.stats()
    if fields.get("enable_prefix_cache", True):
        assert after.num_cached_tokens > before.num_cached_tokens
    if fields.get("num_pages", 1000) < 100:
        assert after.num_evicted_tokens > before.num_evicted_tokens
    assert_idle(engine)


def test_retracted_and_come_one_by_one(dtype: str, alone: list[list[Any]]) -> None:
    """Those of higher priority take the places of others, which go on later."""
    engine = tiny_engine(model(dtype), deterministic=True, max_running_requests=2)
    before = engine.stats()
    request_ids, outputs = [], {}
    for place, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        request_ids.append(engine.add_request(prompt, sampling, priority=place % 4))
        outputs |= {output.request_id: output for output in engine.step()}
    outputs |= finish(engine)
    assert [bits(outputs[request_id]) for request_id in request_ids] == alone
    assert engine.stats().num_retractions > before.num_retractions
    assert_idle(engine)


def test_one_program_runs_every_step(dtype: str) -> None:
    engine = tiny_engine(model(dtype), deterministic=True, enable_prefix_cache=False)
    generate(engine, PROMPTS[:5], SAMPLINGS[:5])
    buckets = {record.bucket for record in engine.ledger.records if record.bucket.num_pages > 1}
    assert {(bucket.kind, bucket.num_tokens, bucket.num_rows) for bucket in buckets} == {("prefill", 64, 64)}


def test_otherwise_bits_depend_on_the_company(dtype: str, alone: list[list[Any]]) -> None:
    """The comparison sees a difference where shapes differ: it is no promise, but what the mode is for."""
    engine = tiny_engine(model(dtype))
    assert [bits(output) for output in generate(engine, PROMPTS, SAMPLINGS)] != alone


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_running_requests": 65}, r"max_running_requests=65, and a step of deterministic=True has 64 rows"),
        ({"page_size": 24}, r"page_size=24, .* take a power of two up to 64"),
        ({"page_size": 128}, r"page_size=128, .* take a power of two up to 64"),
    ],
)
def test_what_does_not_go_with_it(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(deterministic=True, **fields)
