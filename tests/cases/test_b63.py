"""After warm-up nothing compiles, whatever requests ask for and however long they are."""

from collections.abc import Iterator

import numpy as np
import pytest
from compile_events import compile_events
from tiny import MAX_LEN, SMALL, assert_idle, counting_llama, finish

from radix_jax import Engine, EngineConfig, SamplingParams


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of what JAX traced, lowered or compiled while the test runs."""
    with compile_events() as events:
        yield events


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Of all fields any, alone and together."""
    adjusts = rng.random() < 0.5
    max_tokens = None if rng.random() < 0.04 else int(rng.integers(1, 13))
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.7, 1.5])),
        top_k=int(rng.choice([-1, 0, 1, 40, 1000])),
        top_p=float(rng.choice([0.1, 0.9, 1.0])),
        min_p=float(rng.choice([0.0, 0.2])),
        max_tokens=max_tokens,
        min_tokens=int(rng.integers(0, 1 + (max_tokens or 12))),
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        presence_penalty=float(rng.choice([0.0, -0.5])) if adjusts else 0.0,
        frequency_penalty=float(rng.choice([0.0, 2.0])) if adjusts else 0.0,
        logit_bias=[None, {}, {0: -100.0, 63: 5.0}][rng.integers(3)] if adjusts else None,
        logprobs=[None, None, 0, 1, 20][rng.integers(5)],
        seed=[None, 0, 2**63 - 1][rng.integers(3)],
        stop_token_ids=[(), (7,), (1, 2, 3)][rng.integers(3)],
        ignore_eos=bool(rng.integers(2)),
    )


def test_two_hundred_mixed_requests_compile_nothing(compiled: list[str]) -> None:
    config = EngineConfig(**(SMALL | {"max_running_requests": 9, "num_pages": 200}), warmup="full")
    engine = Engine(counting_llama(), None, config, eos_token_ids=[33])
    num_warm = len(engine.ledger.records)
    assert [record.bucket.kind for record in engine.ledger.records].count("copy") == 2
    assert [record.bucket.kind for record in engine.ledger.records].count("sampler") == 1
    assert num_warm == 7
    assert {record.reason for record in engine.ledger.records} == {"warmup"}
    assert all(record.seconds_s > 0 for record in engine.ledger.records)
    assert compiled
    compiled.clear()
    rng = np.random.default_rng(0)
    for i in range(200):
        prompt_len = [1, MAX_LEN - 1, int(rng.integers(1, MAX_LEN))][min(i % 20, 2)]
        prompt = rng.integers(0, 64, prompt_len)
        prompt[: min(prompt_len, 30)] = i % 4
        request_id = engine.add_request(prompt, random_params(rng), namespace=("a", None)[i % 2])
        if i % 9 == 0:
            engine.step()
        if i % 17 == 0:
            engine.abort(request_id)
    outputs = finish(engine)
    assert_idle(engine)
    assert compiled == []
    partial = [output for output in outputs.values() if output.cached_tokens % SMALL["page_size"]]
    assert partial, "no part of a page was copied"
    assert len(engine.ledger.records) == num_warm
    assert engine.stats().num_compiles == num_warm
    assert engine.stats().num_evicted_tokens > 0
    engine.close()
