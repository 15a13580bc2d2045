"""Penalties, bias, min_tokens and log-probabilities are those of a plain oracle over dense logits, whatever the engine
does to get there: pages, chunks, overlap, company, retraction (float32)."""

from typing import Any

import numpy as np
import pytest
from sampling_oracle import expected_greedy, expected_logprobs
from tiny import assert_idle, dense_greedy, finish, generate, greedy, random_prompts, tiny_engine, token_ids

from radix_jax import RequestOutput, SamplingParams

NUM_TOKENS = 12
# Logits of the tiny model spread by about 1. In float32 their rounding, and that of the sum over 512 exponentials, stay
# below this.
LOGPROB_BOUND = 1e-5
PROMPTS = [[int(token) for token in prompt] for prompt in random_prompts(16, lens=(1, 100), num_stems=3, seed=30)]
SMALL_POOL_LEN = 320


def greedy_params(prompt: list[int], kind: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    """Of the `kind`-th kind. Stop ids are what the model would say first."""
    first, second = dense_greedy(prompt, 2)
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.7},
        {"presence_penalty": -1.5, "logprobs": 0},
        {"frequency_penalty": -1.5, "logprobs": 3},
        {"logit_bias": {first: -100.0, 7: 1.5, 8: 1.25}},
        {"min_tokens": 4, "stop_token_ids": (first, second)},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0, "logprobs": 20},
        {
            "repetition_penalty": 0.8,
            "presence_penalty": -1.5,
            "frequency_penalty": 0.9,
            "logit_bias": {second: 2.0},
            "min_tokens": 6,
            "stop_token_ids": (first,),
            "logprobs": 5,
        },
    ]
    return greedy(num_tokens, **kinds[kind % len(kinds)])


def sampled_params(kind: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"logprobs": 0},
        {"repetition_penalty": 1.3, "logprobs": 2, "top_k": 40},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 1, "top_p": 0.5},
        {"logit_bias": {5: 3.0, 6: -3.0}, "min_tokens": 5, "stop_token_ids": tuple(range(60)), "logprobs": 4},
        {"logprobs": 0, "min_p": 0.05, "repetition_penalty": 1.1},
        {},
    ]
    return SamplingParams(temperature=0.8, seed=kind, max_tokens=num_tokens, **kinds[kind % len(kinds)])


PARAMS = [greedy_params(prompt, kind) for kind, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    outputs = [expected_greedy(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    plain = [dense_greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
    changed = [ids != other[: len(ids)] for ids, other in zip(outputs, plain, strict=True)]
    assert {kind % 8 for kind, is_changed in enumerate(changed) if is_changed} == set(range(1, 8))
    return outputs


def check_logprobs(outputs: list[RequestOutput], params: list[SamplingParams]) -> None:
    for output, asked in zip(outputs, params, strict=True):
        [completion] = output.outputs
        if asked.logprobs is None:
            assert completion.logprobs is completion.cumulative_logprob is completion.sampling_logprobs is None
            continue
        each = expected_logprobs(output.prompt_token_ids, completion.token_ids, asked)
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(each)
        for token, entry, wanted in zip(completion.token_ids, completion.logprobs, each, strict=True):
            tops = np.argsort(-wanted.logprobs, kind="stable")[: asked.logprobs].tolist()
            assert list(entry) == [token, *(top for top in tops if top != token)]
            for top, one in entry.items():
                # Tokens closer to it than rounding may stand on either side.
                gaps = wanted.logprobs - wanted.logprobs[top]
                assert (gaps > LOGPROB_BOUND).sum() < one.rank <= (gaps >= -LOGPROB_BOUND).sum()
            assert all(abs(one.logprob - wanted.logprobs[top]) < LOGPROB_BOUND for top, one in entry.items())
            assert {one.decoded_token for one in entry.values()} == {None}
        total = sum(wanted.logprobs[token] for token, wanted in zip(completion.token_ids, each, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total, abs=LOGPROB_BOUND * len(each))
        sampling = [wanted.sampling for wanted in each]
        np.testing.assert_allclose(completion.sampling_logprobs, sampling, rtol=0, atol=LOGPROB_BOUND)


MODES: list[dict[str, Any]] = [
    {},
    {"enable_prefix_cache": False},
    {"max_prefill_tokens": 128},
    {"partial_pages": False},
    {"overlap": False},
    {"mixed_steps": True},
    {"mixed_steps": True, "overlap": False},
    {"max_consecutive_prefills": 1, "max_running_requests": 3},
    {"num_pages": 1 + SMALL_POOL_LEN // 4},
]


@pytest.mark.parametrize(
    "fields", MODES, ids=lambda fields: "-".join(f"{name}={value}" for name, value in fields.items()) or "chunked"
)
def test_greedy_ids_and_log_probabilities(fields: dict[str, Any], expected: list[list[int]]) -> None:
    """Cold, and from what the first round left in the cache and in the seats."""
    engine = tiny_engine(**fields)
    for order in (np.arange(len(PROMPTS)), np.random.default_rng(4).permutation(len(PROMPTS))):
        params = [PARAMS[i] for i in order]
        outputs = generate(engine, [PROMPTS[i] for i in order], params)
        assert token_ids(outputs) == [expected[i] for i in order]
        check_logprobs(outputs, params)
    assert_idle(engine)


def test_drawn_ids_and_log_probabilities() -> None:
    """Each alone, then the same among each other and among greedy ones in every mode."""
    prompts = [PROMPTS[kind % 3] for kind in range(12)]
    params = [sampled_params(kind) for kind in range(12)]
    engine = tiny_engine()
    alone = [generate(engine, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    check_logprobs(alone, params)
    assert any(completion.sampling_logprobs for output in alone for completion in output.outputs)
    for fields in MODES:
        outputs = generate(tiny_engine(**fields), [*PROMPTS, *prompts], [*PARAMS, *params])[len(PROMPTS) :]
        assert token_ids(outputs) == token_ids(alone)
        check_logprobs(outputs, params)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mixed_steps", [True, False])
def test_after_retraction(overlap: bool, mixed_steps: bool) -> None:
    """What was generated before a request lost its pages still counts, in whatever seat it goes on."""
    engine = tiny_engine(page_size=2, num_pages=61, overlap=overlap, mixed_steps=mixed_steps)
    prompts = [[int(token) for token in prompt] for prompt in random_prompts(8, lens=(1, 20), num_stems=2, seed=31)]
    kinds = (1, 2, 3, 6, 7, 1, 6, 7)  # those to which the output matters
    params = [greedy_params(prompt, kind, 50) for kind, prompt in zip(kinds, prompts, strict=True)]
    before = engine.stats().num_retractions
    outputs = generate(engine, prompts, params)
    assert token_ids(outputs) == [expected_greedy(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    check_logprobs(outputs, params)
    assert engine.stats().num_retractions > before
    assert_idle(engine)


@pytest.mark.parametrize("after", range(0, 16, 3))
def test_retracted_at_any_point_into_another_seat(after: int) -> None:
    """While the prompt is computed in chunks, at the first token, and later; another request takes the seat."""
    engine = tiny_engine(overlap=False, max_prefill_tokens=16)
    prompt = [int(token) for token in random_prompts(1, lens=(70, 71), seed=22)[0]]
    params = greedy_params(prompt, 7)
    request_id = engine.add_request(prompt, params)
    for _ in range(after):
        engine.step()
    scheduler = engine._scheduler
    if request_id in scheduler.states and scheduler._running.get(request_id) is not None:
        scheduler._retract(scheduler.states[request_id])
        other = engine.add_request(PROMPTS[1], PARAMS[1], priority=1)
        while scheduler._running.get(other) is None:
            engine.step()
    if request_id in scheduler.states:
        output = finish(engine)[request_id]
        assert output.outputs[0].token_ids == expected_greedy(prompt, params)
        check_logprobs([output], [params])
    finish(engine)
    assert_idle(engine)


def test_seats_of_the_aborted_are_taken_over(expected: list[list[int]]) -> None:
    """Half of the requests end at some step, with a step of theirs on its way to the device."""
    engine = tiny_engine(max_running_requests=3)
    rng = np.random.default_rng(5)
    request_ids = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    aborted_at = {request_id: rng.integers(0, 60) for request_id in request_ids[::2]}
    outputs: dict[str, RequestOutput] = {}
    for step in range(1000):
        for request_id in [request_id for request_id, at in aborted_at.items() if at == step]:
            if (output := engine.abort(request_id)) is not None:
                outputs[request_id] = output
        if not engine.has_unfinished():
            break
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    ends = [outputs[request_id] for request_id in request_ids]
    assert "abort" in {end.outputs[0].finish_reason for end in ends}
    for end, ids in zip(ends, expected, strict=True):
        assert end.outputs[0].token_ids == ids[: len(end.outputs[0].token_ids)]
        assert end.outputs[0].finish_reason == "abort" or end.outputs[0].token_ids == ids
    check_logprobs(ends, PARAMS)
    assert_idle(engine)


def test_every_output_on_the_way_has_the_log_probabilities_of_its_tokens() -> None:
    engine = tiny_engine()
    engine.add_request(PROMPTS[0], greedy(5, logprobs=1))
    lens = []
    while engine.has_unfinished():
        for output in engine.step():
            [completion] = output.outputs
            assert completion.logprobs is not None
            assert completion.sampling_logprobs == [0.0] * len(completion.token_ids)
            lens.append((len(completion.token_ids), len(completion.logprobs)))
    assert lens == [(n, n) for n in range(1, 6)]
