"""Rollouts as arrays: the engine's own samples, each group computed once; and scores as the dense model's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny import (
    MAX_LEN,
    SMALL,
    TINY,
    VOCAB_SIZE,
    assert_idle,
    dense_drawn,
    dense_logits,
    drawn,
    greedy,
    module_of,
    random_prompts,
    random_weights,
    tiny_engine,
    tiny_llama,
)

from radix_jax import LLM, Engine, EngineConfig, Rollouts, SamplingParams
from radix_jax.request import FinishAt

PROMPTS = random_prompts(3, lens=(9, 40), seed=12)
NUM_TOKENS, NUM_SAMPLES = 5, 3


def dense_logprobs(ids: Any, module: Any = None) -> np.ndarray:
    """[T - 1]: of each token after the first."""
    padded = jnp.zeros(MAX_LEN, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))
    logits = dense_logits(module or tiny_llama())(padded).astype(jnp.float32)
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(ids) - 1), np.asarray(ids[1:])]


@pytest.fixture
def rollouts() -> Rollouts:
    """3 prompts, 3 samples each."""
    return tiny_engine().rollout(PROMPTS, drawn(NUM_TOKENS, seed=9), n=NUM_SAMPLES)


def test_rows_are_the_samples_of_each_prompt(rollouts: Rollouts) -> None:
    assert rollouts.token_ids.shape == (9, 64)
    assert all(isinstance(array, jax.Array) for array in jax.tree.leaves(rollouts))
    for row, prompt in enumerate(np.repeat(np.arange(3), NUM_SAMPLES)):
        ids, prompt_len = np.asarray(rollouts.token_ids[row]), len(PROMPTS[prompt])
        expected = dense_drawn(PROMPTS[prompt], NUM_TOKENS, seed=9 + prompt, sample_index=row % NUM_SAMPLES)
        end = prompt_len + NUM_TOKENS
        assert ids[:end].tolist() == [*PROMPTS[prompt].tolist(), *expected]
        assert not ids[end:].any()
        assert (rollouts.prompt_lens[row], rollouts.lens[row], rollouts.prompt_index[row]) == (prompt_len, end, prompt)
        assert np.flatnonzero(rollouts.output_mask[row]).tolist() == list(range(prompt_len, end))
        assert rollouts.truncated[row]


def test_log_probabilities_are_the_models_own(rollouts: Rollouts) -> None:
    """At temperature 1, without filters, those of the distribution drawn from are the same."""
    for row in range(len(rollouts.token_ids)):
        end, mask = int(rollouts.lens[row]), np.asarray(rollouts.output_mask[row])
        dense = np.append(0.0, dense_logprobs(np.asarray(rollouts.token_ids[row][:end])))
        for values in (rollouts.logprobs[row], rollouts.sampling_logprobs[row]):
            assert np.abs(np.asarray(values)[:end] - dense)[mask[:end]].max() < 1e-5
            assert not np.asarray(values)[~mask].any()
    assert not np.asarray(rollouts.weight_versions).any()


def test_each_prompt_is_computed_once_and_in_the_same_step() -> None:
    engine = tiny_engine()
    before = engine.stats()
    engine.rollout(PROMPTS[:1], drawn(2, seed=1), n=4)
    after = engine.stats()
    prompt_len = len(PROMPTS[0])
    rest = prompt_len - (prompt_len - 1) // 4 * 4
    assert after.num_prefill_tokens - before.num_prefill_tokens == prompt_len + 3 * rest
    assert after.num_prefill_steps - before.num_prefill_steps == 1
    assert_idle(engine)


def test_it_is_a_pytree_on_the_callers_sharding() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("rows",)), PartitionSpec("rows"))
    rollouts = tiny_engine().rollout(PROMPTS[:2], greedy(3), n=2, seq_len=48, pad_id=7, sharding=sharding)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(rollouts))
    assert rollouts.token_ids.shape == (4, 48)
    assert rollouts.token_ids[0, -1] == 7
    loss = jax.jit(lambda r: -jnp.sum(jnp.where(r.output_mask, r.logprobs, 0.0)) / jnp.sum(r.output_mask))
    assert 0 < loss(rollouts) < 20
    assert not np.asarray(rollouts.sampling_logprobs).any()  # greedy


def test_an_end_by_a_stop_is_no_truncation() -> None:
    checks = [lambda _, ids: FinishAt(1, "enough"), None]
    rollouts = tiny_engine().rollout(PROMPTS[:2], drawn(4, seed=2), n=2, finish_checks=checks)
    assert np.asarray(rollouts.truncated).tolist() == [False, False, True, True]
    assert (np.asarray(rollouts.lens) - np.asarray(rollouts.prompt_lens)).tolist() == [1, 1, 4, 4]


@pytest.mark.parametrize(
    ("prompts", "fields", "message"),
    [
        ([], {}, "no prompts"),
        ([[1, 2], [VOCAB_SIZE]], {}, "prompt 1: prompt token id 512 at place 0 is outside"),
        ([[1] * 30], {"seq_len": 33}, "prompts of up to 30 tokens and max_tokens=4 may exceed seq_len=33"),
        ([[1]], {"n": 0}, "n=0 is below its least value 1"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(prompts: Any, fields: dict[str, Any], message: str) -> None:
    engine = tiny_engine()
    with pytest.raises(ValueError, match=message):
        engine.rollout(prompts, drawn(4, seed=1), **fields)
    assert not engine.has_unfinished()
    assert_idle(engine)


def test_a_short_queue_is_waited_for() -> None:
    engine = tiny_engine(max_queued_requests=4)
    rollouts = engine.rollout([PROMPTS[0], PROMPTS[1], PROMPTS[2]], greedy(2), n=3)
    assert len(rollouts.token_ids) == 9


def test_scores_are_the_dense_models_and_use_the_cache() -> None:
    engine = tiny_engine()
    sequences = [PROMPTS[0], np.append(PROMPTS[0], PROMPTS[1]), [3], PROMPTS[0]]
    for _ in range(2):
        scores = engine.score(sequences)
        assert [len(one) for one in scores] == [len(ids) - 1 for ids in sequences]
        for ids, one in zip(sequences, scores, strict=True):
            assert one.dtype == np.float32
            assert len(ids) == 1 or np.abs(one - dense_logprobs(np.asarray(ids))).max() < 1e-5
    before = engine.stats().num_prefill_tokens
    engine.score([np.append(PROMPTS[0], PROMPTS[1])])
    total = len(PROMPTS[0]) + len(PROMPTS[1])
    assert engine.stats().num_prefill_tokens - before == total - (total // 4 * 4 - 1)


def test_scores_in_bfloat16() -> None:
    module = module_of(TINY, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_weights(TINY)))
    engine = Engine(module, None, EngineConfig(**SMALL))
    for ids, one in zip(PROMPTS, engine.score(PROMPTS), strict=True):
        assert np.abs(one - dense_logprobs(ids, module)).max() < 0.1


def test_rollouts_score_as_they_were_sampled(rollouts: Rollouts) -> None:
    """Token in, token out: what came out goes in again."""
    ends = np.asarray(rollouts.lens)
    sequences = [np.asarray(ids[:end]) for ids, end in zip(rollouts.token_ids, ends, strict=True)]
    for row, one in enumerate(tiny_engine().score(sequences)):
        start, end = int(rollouts.prompt_lens[row]), int(ends[row])
        assert np.abs(one[start - 1 :] - np.asarray(rollouts.logprobs[row, start:end])).max() < 1e-5


def test_through_llm() -> None:
    llm = LLM(tiny_llama(), **SMALL)
    rollouts = llm.rollout(PROMPTS[:1], SamplingParams(max_tokens=2, temperature=0.0), n=2)
    assert len(rollouts.token_ids) == 2
    [scores] = llm.score(PROMPTS[:1])
    assert len(scores) == len(PROMPTS[0]) - 1
    with pytest.raises(ValueError, match="needs text, and this LLM has no tokenizer"):
        llm.rollout(PROMPTS[:1], SamplingParams(stop="x"), n=2)
