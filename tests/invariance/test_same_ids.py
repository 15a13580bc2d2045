"""The same greedy ids whatever the engine does to get there: pages, chunks, company, order, eviction (float32).

All of it several times: through XLA attention, and through the GPU's and the TPU's kernels in interpret mode, which
takes minutes; test_kernels.py has a short form of that. A TPU's kernel takes half a second a step there, so that it is
given fewer and shorter requests, in pages that it can do; each of them goes the same ways.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tiny import (
    assert_idle,
    dense_greedy,
    finish,
    generate,
    greedy,
    random_prompts,
    share_programs,
    tiny_engine,
    token_ids,
)

from radix_jax import Engine

PROMPTS = random_prompts(24, lens=(1, 110), num_stems=3, seed=20)


@dataclass(frozen=True)
class Load:
    """What a backend is given to do.

    page_size: where a test has no other. small_pool_len: tokens of a pool from which prefixes are evicted all the time.
    long: (requests, tokens of the output of each, tokens of a pool that can't hold them all). chunked: (tokens of the
    prompt, of the output) of a request that is computed in chunks of 16.
    """

    page_size: int
    least_page_size: int
    num_prompts: int
    num_tokens: int
    small_pool_len: int
    long: tuple[int, int, int]
    chunked: tuple[int, int]


MUCH = Load(
    page_size=4,
    least_page_size=1,
    num_prompts=24,
    num_tokens=8,
    small_pool_len=320,  # a third of what 8 requests fill
    long=(8, 60, 120),
    chunked=(70, 10),
)
LITTLE = Load(
    page_size=16,
    least_page_size=8,
    num_prompts=10,
    num_tokens=3,
    small_pool_len=128,
    long=(5, 32, 128),
    chunked=(40, 3),
)
LOADS = {"xla": MUCH, "pallas_interpret": MUCH, "pallas_tpu_interpret": LITTLE}


class Lab:
    """Engines on one backend, and what its load comes to."""

    def __init__(self, attention_backend: str) -> None:
        self.attention_backend = attention_backend
        self.load = LOADS[attention_backend]
        self.prompts = PROMPTS[: self.load.num_prompts]
        self.sampling = greedy(self.load.num_tokens)
        self.expected = [dense_greedy(prompt, self.load.num_tokens) for prompt in self.prompts]

    def engine(self, *, pool_len: int | None = None, **fields: Any) -> Engine:
        """pool_len: in tokens; None: room for all."""
        page_size = fields.setdefault("page_size", self.load.page_size)
        if page_size < self.load.least_page_size:
            pytest.skip(f"{self.attention_backend} can't do pages of {page_size} tokens")
        fields["num_pages"] = 1 + (6400 if pool_len is None else pool_len) // page_size
        return share_programs(tiny_engine(attention_backend=self.attention_backend, **fields))


BACKENDS = ["xla", *(pytest.param(name, marks=pytest.mark.slow) for name in LOADS if name != "xla")]


@pytest.fixture(scope="module", params=BACKENDS)
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(request.param)


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
def test_batched_twice(fields: dict[str, Any], lab: Lab) -> None:
    """Cold, and from what the first round left in the cache."""
    engine = lab.engine(**fields)
    before = engine.stats()
    for _ in range(2):
        outputs = generate(engine, lab.prompts, lab.sampling)
        assert token_ids(outputs) == lab.expected
    assert_idle(engine)
    assert (engine.stats().num_mixed_steps > before.num_mixed_steps) == fields.get("mixed_steps", False)
    page_size = engine.config.page_size
    for output in outputs:
        most = len(output.prompt_token_ids) - 1 if fields.get("enable_prefix_cache", True) else 0
        assert output.cached_tokens == (most if fields.get("partial_pages", True) else most // page_size * page_size)


def test_alone(lab: Lab) -> None:
    engine = lab.engine()
    outputs = [generate(engine, [prompt], lab.sampling)[0] for prompt in lab.prompts]
    assert token_ids(outputs) == lab.expected
    assert sum(output.cached_tokens for output in outputs) > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_any_order(seed: int, lab: Lab) -> None:
    engine = lab.engine()
    order = np.random.default_rng(seed).permutation(len(lab.prompts))
    outputs = generate(engine, [lab.prompts[i] for i in order], lab.sampling)
    assert token_ids(outputs) == [lab.expected[i] for i in order]


def test_requests_that_come_one_by_one_while_others_run(lab: Lab) -> None:
    engine = lab.engine()
    request_ids, outputs = [], {}
    for prompt in lab.prompts:
        request_ids.append(engine.add_request(prompt, lab.sampling))
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    outputs |= finish(engine)
    assert token_ids([outputs[request_id] for request_id in request_ids]) == lab.expected


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16])
def test_after_eviction(page_size: int, lab: Lab) -> None:
    pool_len = lab.load.small_pool_len
    engine = lab.engine(page_size=page_size, pool_len=pool_len)
    before = engine.stats()
    for _ in range(2):
        assert token_ids(generate(engine, lab.prompts, lab.sampling)) == lab.expected
    after = engine.stats()
    assert after.num_evicted_tokens - before.num_evicted_tokens > pool_len
    assert after.num_cached_tokens > before.num_cached_tokens
    assert_idle(engine)


def test_with_aborts_in_between(lab: Lab) -> None:
    """Every third request is aborted at some step, some of them in the middle of their prompt."""
    engine = lab.engine(pool_len=lab.load.small_pool_len)
    rng = np.random.default_rng(3)
    request_ids = [engine.add_request(prompt, lab.sampling) for prompt in lab.prompts]
    aborted_at = {request_id: rng.integers(0, 1 + len(request_ids)) for request_id in request_ids[::3]}
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
    for end, ids in zip(ends, lab.expected, strict=True):
        assert end.token_ids == ids[: len(end.token_ids)]
        assert end.finish_reason == "abort" or len(end.token_ids) == lab.load.num_tokens
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mixed_steps", [True, False])
def test_after_retraction(overlap: bool, mixed_steps: bool, lab: Lab) -> None:
    """Long outputs of requests that are let in for a part of them, in a pool that can't hold them all."""
    num_prompts, num_tokens, pool_len = lab.load.long
    page_size = max(2, lab.load.least_page_size)
    engine = lab.engine(page_size=page_size, pool_len=pool_len, overlap=overlap, mixed_steps=mixed_steps)
    prompts = random_prompts(num_prompts, lens=(1, 20), num_stems=2, seed=21)
    before = engine.stats()
    outputs = generate(engine, prompts, greedy(num_tokens))
    assert token_ids(outputs) == [dense_greedy(prompt, num_tokens) for prompt in prompts]
    assert engine.stats().num_retractions > before.num_retractions
    assert_idle(engine)


def test_priorities_take_places_and_change_no_token(lab: Lab) -> None:
    engine = lab.engine(max_running_requests=2)
    before = engine.stats()
    request_ids, outputs = [], {}
    for place, prompt in enumerate(lab.prompts):
        request_ids.append(engine.add_request(prompt, lab.sampling, priority=place % 4))
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    outputs |= finish(engine)
    assert token_ids([outputs[request_id] for request_id in request_ids]) == lab.expected
    assert engine.stats().num_retractions > before.num_retractions
    assert_idle(engine)


@pytest.mark.parametrize("after", range(14))
@pytest.mark.parametrize("then", ["resume", "abort"])
def test_retracted_at_any_point(after: int, then: str, lab: Lab) -> None:
    """While the prompt is computed in chunks, at the first token, and later."""
    prompt_len, num_tokens = lab.load.chunked
    if after >= -(-prompt_len // 16) + num_tokens - 1:
        pytest.skip(f"{lab.attention_backend} is given a request that has ended by then")
    engine = lab.engine(overlap=False, max_prefill_tokens=16)
    engine.flush_cache()
    prompt = random_prompts(1, lens=(prompt_len, prompt_len + 1), seed=22)[0]
    request_id = engine.add_request(prompt, greedy(num_tokens))
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
        assert output.outputs[0].token_ids == dense_greedy(prompt, num_tokens)
        assert output.cached_tokens == 0, "what it finds of its own is no hit"
    assert_idle(engine)
