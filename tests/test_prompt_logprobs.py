"""Log-probabilities of prompts: as the dense model gives them, whatever the cache holds, and of no other tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    MAX_LEN,
    SMALL,
    VOCAB_SIZE,
    assert_idle,
    dense_greedy,
    dense_logits,
    drawn,
    finish,
    generate,
    greedy,
    random_prompts,
    share_programs,
    tiny_engine,
    tiny_llama,
    token_ids,
)

from radix_jax import Engine, EngineConfig, RequestOutput, SamplingParams

BOUND = 1e-5
PROMPT = np.random.default_rng(5).integers(0, VOCAB_SIZE, 100).astype(np.int32)


def dense_logprobs(prompt: np.ndarray) -> np.ndarray:
    """[prompt_len - 1, V]: row j - 1 is of token j."""
    ids = jnp.zeros(MAX_LEN, jnp.int32).at[: len(prompt)].set(jnp.asarray(prompt))
    return np.asarray(jax.nn.log_softmax(dense_logits(tiny_llama())(ids), axis=-1))[: len(prompt) - 1]


def check(output: RequestOutput, num_top: int) -> None:
    """An entry a token, with values, ranks and best tokens of the dense model."""
    prompt, entries = np.asarray(output.prompt_token_ids), output.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for token_id, entry, dense in zip(prompt[1:].tolist(), entries[1:], dense_logprobs(prompt), strict=True):
        assert entry is not None
        best = np.argsort(-dense, kind="stable")[:num_top].tolist()
        assert next(iter(entry)) == token_id
        assert set(entry) == {token_id, *best}
        for one, value in entry.items():
            assert abs(value.logprob - dense[one]) < BOUND
            # Tokens closer to it than rounding may stand on either side.
            assert (dense > dense[one] + BOUND).sum() < value.rank <= (dense >= dense[one] - BOUND).sum()


def fresh_engine(**fields: Any) -> Engine:
    return share_programs(Engine(tiny_llama(), None, EngineConfig(**(SMALL | fields))))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"page_size": 1, "num_pages": 6400}, marks=pytest.mark.slow),
        {"page_size": 16, "num_pages": 400},
        pytest.param({"partial_pages": False}, marks=pytest.mark.slow),
        {"enable_prefix_cache": False},
        {"mixed_steps": True, "overlap": False},
    ],
    ids=lambda fields: "-".join(fields) or "default",
)
def test_cold_and_warm(fields: dict[str, Any]) -> None:
    """Prompts in chunks and at once, that share stems; asked for in turns with requests that do not ask."""
    engine = fresh_engine(**fields)
    prompts = [PROMPT, PROMPT[:41], *random_prompts(5, lens=(1, 90), num_stems=2, seed=8)]
    asks = [(0, None, 5)[i % 3] for i in range(len(prompts))]
    for _ in range(3):
        samplings = [greedy(2, prompt_logprobs=num) for num in asks]
        for num, output, prompt in zip(asks, generate(engine, prompts, samplings), prompts, strict=True):
            assert output.outputs[0].token_ids == dense_greedy(prompt, 2)
            if num is None:
                assert output.prompt_logprobs is None
            else:
                check(output, num)
        asks = asks[1:] + asks[:1]
    assert_idle(engine)


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 6400), (4, 1600), (16, 400)])
@pytest.mark.parametrize("partial_pages", [True, False])
def test_what_is_computed_again(page_size: int, num_pages: int, partial_pages: bool) -> None:
    """A prompt computed without log-probabilities helps nothing; one computed with them as a prompt usually does."""
    engine = tiny_engine(page_size=page_size, num_pages=num_pages, partial_pages=partial_pages)
    prompt_len = len(PROMPT)  # whole pages of each size but 16, and of 16 with a rest of 4
    usual = prompt_len - 1 if partial_pages else (prompt_len - 1) // page_size * page_size

    def cached_len(**fields: Any) -> int:
        output = generate(engine, [PROMPT], greedy(1, **fields))[0]
        if fields:
            check(output, fields["prompt_logprobs"])
        return output.cached_tokens

    assert [cached_len(), cached_len()] == [0, usual]
    known = prompt_len // page_size * page_size
    known = known - 1 if partial_pages or page_size == 1 else known - page_size
    expected = usual if prompt_len % page_size == 0 else known
    assert [cached_len(prompt_logprobs=0), cached_len(prompt_logprobs=0)] == [0, expected]
    # The most likely tokens were not asked for.
    assert [cached_len(prompt_logprobs=5), cached_len(prompt_logprobs=20)] == [0, expected]
    assert cached_len(prompt_logprobs=0) == expected
    assert cached_len() == usual


def test_a_longer_prompt_and_one_that_turns_off() -> None:
    """Entries at the border between what is known and what is computed are of the tokens there."""
    engine = tiny_engine()
    generate(engine, [PROMPT[:50]], greedy(1, prompt_logprobs=2))
    turned = PROMPT.copy()
    turned[30:] = turned[30:][::-1]
    for prompt, cached_len in ((PROMPT, 47), (turned, 27), (PROMPT[:48], 47), (PROMPT[:9], 7)):
        [output] = generate(engine, [prompt], greedy(1, prompt_logprobs=2))
        check(output, 2)
        assert output.cached_tokens == cached_len


def test_pages_given_out_again_are_forgotten() -> None:
    """A small pool: pages that carried entries of one prompt soon hold another one, asked for or not."""
    engine = tiny_engine(num_pages=40)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, 60).astype(np.int32) for _ in range(4)]
    for i in rng.integers(0, 4, 24):
        num = None if rng.random() < 0.4 else 3
        [output] = generate(engine, [prompts[i]], greedy(2, prompt_logprobs=num))
        assert output.outputs[0].token_ids == dense_greedy(prompts[i], 2)
        if num is not None:
            check(output, num)
    assert engine.stats().num_evicted_tokens > 0


def test_retracted_requests() -> None:
    engine = tiny_engine(num_pages=37)
    before = engine.stats().num_retractions
    prompts = random_prompts(8, lens=(20, 60), num_stems=2, seed=4)
    outputs = generate(engine, prompts, greedy(40, prompt_logprobs=1))
    assert engine.stats().num_retractions > before
    assert token_ids(outputs) == [dense_greedy(prompt, 40) for prompt in prompts]
    for output in outputs:
        check(output, 1)
    assert_idle(engine)


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_several_samples_compute_it_once(enable_prefix_cache: bool) -> None:
    engine = tiny_engine(enable_prefix_cache=enable_prefix_cache)
    before = engine.stats().num_prefill_tokens
    [output] = generate(engine, [PROMPT], drawn(3, seed=1, n=4, prompt_logprobs=2))
    check(output, 2)
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    shared_len = (len(PROMPT) - 1) // 4 * 4
    assert engine.stats().num_prefill_tokens - before == len(PROMPT) + 3 * (len(PROMPT) - shared_len)


def test_no_program_more() -> None:
    engine = tiny_engine()
    generate(engine, [PROMPT, PROMPT], greedy(3))
    num_compiles = len(engine.ledger.records)
    generate(engine, [PROMPT, PROMPT[:70]], greedy(3, prompt_logprobs=20, logprobs=3))
    assert len(engine.ledger.records) == num_compiles


def test_streamed_from_the_first_token_on() -> None:
    engine = tiny_engine()
    states = list(engine.stream(PROMPT, greedy(3, prompt_logprobs=0)))
    assert [state.prompt_logprobs is None for state in states] == [False] * 3
    assert states[0].prompt_logprobs is states[-1].prompt_logprobs


def test_an_abort_between_chunks_leaves_what_is_known() -> None:
    engine = tiny_engine(overlap=False)
    request_id = engine.add_request(PROMPT, greedy(3, prompt_logprobs=0))
    engine.step()
    engine.abort(request_id)
    output = finish(engine)
    assert output == {}
    [output] = generate(engine, [PROMPT], greedy(1, prompt_logprobs=0))
    check(output, 0)
    assert output.cached_tokens == 63


@pytest.mark.parametrize(
    ("num", "message"), [(-1, "below its least value 0"), (21, "above its largest value 20"), (True, "not an int")]
)
def test_numbers_out_of_range(num: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(prompt_logprobs=num)
