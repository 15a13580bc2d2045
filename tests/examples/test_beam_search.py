"""Beam search over held prefixes finds what beams over dense forwards of whole sequences find, and computes no token
twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MAX_LEN, MIN_TOP2_GAP, assert_idle, dense_logits, random_prompts, tiny_engine, tiny_llama

from examples.beam_search import beam_search

[PROMPT] = random_prompts(1, lens=(30, 31), seed=21)
NUM_TOKENS = 5


def dense_beams(prompt: np.ndarray, width: int, num_tokens: int) -> list[tuple[list[int], float]]:
    """The same search, each beam's next log-probabilities from the whole sequence anew.

    Refuses beams whose rank hangs on rounding: take another prompt.
    """
    logits_of = dense_logits(tiny_llama())
    beams = [([], 0.0)]
    for _ in range(num_tokens):
        grown = []
        for ids, score in beams:
            sequence = np.zeros(MAX_LEN, np.int32)
            end = len(prompt) + len(ids)
            sequence[:end] = [*prompt, *ids]
            logprobs = np.asarray(jax.nn.log_softmax(logits_of(jnp.asarray(sequence))[end - 1]))
            grown += [([*ids, token_id], score + float(logprob)) for token_id, logprob in enumerate(logprobs)]
        grown.sort(key=lambda beam: -beam[1])
        scores = np.array([score for _, score in grown[: width + 1]])
        assert (-np.diff(scores)).min() > MIN_TOP2_GAP, f"ranks hang on {-np.diff(scores)}"
        beams = grown[:width]
    return beams


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_it_finds_what_dense_beams_find(width: int, page_size: int) -> None:
    engine = tiny_engine(page_size=page_size)
    before = engine.stats().num_prefill_tokens
    found = beam_search(engine, PROMPT.tolist(), width=width, num_tokens=NUM_TOKENS)
    expected = dense_beams(PROMPT, width, NUM_TOKENS)
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], rtol=0, atol=1e-4)
    # The prompt once, and the newest token of each beam but those of the last round.
    assert engine.stats().num_prefill_tokens - before == len(PROMPT) + (NUM_TOKENS - 1) * width
    assert_idle(engine)
