"""What sampling has to give, in numpy over dense logits: one token at a time, from the whole sequence anew."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from tiny import MAX_LEN, MIN_TOP2_GAP, dense_logits, tiny_llama

from radix_jax import SamplingParams


@dataclass(frozen=True)
class Expected:
    """Of one output token: (raw log-probability, rank) of every token, and its own under the sampling distribution."""

    logprobs: np.ndarray
    ranks: np.ndarray
    sampling: float


def adjusted(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Iterable[int]
) -> np.ndarray:
    """Logits [V] after bias, min_tokens, repetition, frequency and presence penalty, each by its definition."""
    out = np.array(logits, np.float64)
    for token, value in (params.logit_bias or {}).items():
        out[token] += value
    if len(output) < params.min_tokens:
        out[[*stop_ids]] = -np.inf
    for token in {*prompt, *output}:
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token in set(output):
        out[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return out


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Logits [V] / temperature with what min_p, top_k and top_p drop at minus infinity. Refuses choices that hang on
    rounding: take another seed."""
    scaled = logits / params.temperature
    best_first = np.argsort(-scaled, kind="stable")
    probabilities = np.exp(log_softmax(scaled))[best_first]
    keeps = probabilities >= params.min_p * probabilities[0]
    margins = [np.abs(probabilities / probabilities[0] - params.min_p).min()] if params.min_p else []
    if params.top_k > 0:
        keeps &= np.arange(len(keeps)) < params.top_k
        margins.append(scaled[best_first[params.top_k - 1]] - scaled[best_first[params.top_k]])
    left = np.where(keeps, probabilities, 0)
    before = left.cumsum() / left.sum() - left / left.sum()
    if params.top_p < 1.0:
        keeps &= before < params.top_p
        margins.append(np.abs(before - params.top_p).min())
    assert min(margins, default=1.0) > 1e-6, "a filter's edge is within rounding"
    out = np.full(len(scaled), -np.inf)
    out[best_first[keeps]] = scaled[best_first[keeps]]
    return out


def dense_at(ids: Sequence[int]) -> np.ndarray:
    """The tiny model's logits [V] after `ids`."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(ids)] = ids
    return np.asarray(dense_logits(tiny_llama())(jnp.asarray(padded)))[len(ids) - 1]


def expected_greedy(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The output ids up to max_tokens or a stop id. Refuses a choice that hangs on rounding: take another prompt."""
    output: list[int] = []
    assert params.max_tokens is not None
    stop_ids = params.stop_token_ids or ()
    while len(output) < params.max_tokens:
        logits = adjusted(dense_at([*prompt, *output]), params, prompt, output, stop_ids)
        second, first = np.sort(logits)[-2:]
        assert first - second > MIN_TOP2_GAP, f"the two best tokens at place {len(output)} are {first - second} apart"
        output.append(int(logits.argmax()))
        if output[-1] in stop_ids:
            break
    return output


def expected_logprobs(prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> list[Expected]:
    """Of each token of an output that the engine gave."""
    each = []
    for place, token in enumerate(output):
        logits = dense_at([*prompt, *output[:place]])
        ranks = np.empty(len(logits), int)
        ranks[np.argsort(-logits, kind="stable")] = np.arange(1, len(logits) + 1)
        sampling = 0.0
        if params.temperature > 0:
            after = adjusted(logits, params, prompt, output[:place], params.stop_token_ids or ())
            sampling = float(log_softmax(filtered(after, params))[token])
        each.append(Expected(log_softmax(np.float64(logits)), ranks, sampling))
    return each
