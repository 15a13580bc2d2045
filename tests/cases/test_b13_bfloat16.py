"""In bfloat16 cold, warm, chunked and uncached runs round differently: by how much, and what that can change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import chunked_logits, decoded_logits, shuffled_pages
from tiny import MAX_LEN, TINY, dense_logits, generate, greedy, module_of, random_prompts, random_weights, tiny_engine

from radix_jax.functional import decode, init_kv, prefill
from radix_jax.models.llama import Llama
from radix_jax.models.registry import params_of

# ARCHITECTURE.md states it, for logits that spread by 1.
BOUND = 0.05
PAGE_SIZE, NUM_PAGES = 4, 60
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def module() -> Llama:
    return module_of(TINY, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_weights(TINY)))


def logits_of(module: Llama, token_ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] by the module itself, of the whole sequence at once."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(dense_logits(module)(jnp.asarray(padded)))[: len(token_ids)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logits_stay_within_the_bound(module: Llama, seed: int) -> None:
    params = params_of(module)
    [token_ids] = random_prompts(1, lens=(90, 91), seed=seed)
    pages, kv = shuffled_pages(len(token_ids), PAGE_SIZE, NUM_PAGES), init_kv(TINY, NUM_PAGES, PAGE_SIZE)
    whole = logits_of(module, token_ids)
    assert 0.5 < whole.std() < 2
    chunked = chunked_logits(jax.jit(functools.partial(prefill, params)), kv, token_ids, pages)
    decoded = decoded_logits(jax.jit(functools.partial(decode, params)), kv, token_ids, pages)
    for logits in (chunked, decoded):
        np.testing.assert_allclose(logits, whole, rtol=0, atol=BOUND)


def test_a_choice_changes_only_where_the_best_are_closer_than_the_bound(module: Llama) -> None:
    prompts = random_prompts(24, lens=(1, 100), num_stems=3, seed=32)
    cached, uncached = tiny_engine(module), tiny_engine(module, enable_prefix_cache=False)
    for engine in (cached, cached, uncached):
        together = generate(engine, prompts, greedy(NUM_TOKENS))
        alone = [generate(engine, [prompt], greedy(NUM_TOKENS))[0] for prompt in prompts]
        for output in [*together, *alone]:
            token_ids = np.array(output.prompt_token_ids + output.outputs[0].token_ids, np.int32)
            logits = logits_of(module, token_ids)[-NUM_TOKENS - 1 : -1]
            chosen = logits[np.arange(NUM_TOKENS), token_ids[-NUM_TOKENS:]]
            assert (chosen > logits.max(axis=1) - BOUND).all()
