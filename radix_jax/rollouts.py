"""Rollouts: samples of groups of prompts as padded arrays, ready for a loss; and scores of given sequences."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32

from radix_jax.arrays import Array, register_pytree
from radix_jax.batch import Serves, run_all
from radix_jax.request import FinishCheck, RequestOutput, SamplingParams

# Sequences are padded to a power of two, this or longer, so that a loss sees few shapes.
_LEAST_SEQ_LEN = 64


@register_pytree
@dataclass(frozen=True)
class Rollouts:
    """Samples of prompts, a row each: the n samples of a prompt follow each other. A pytree; rows R, places S.

        places      [0, prompt_lens)    [prompt_lens, lens)     [lens, S)
        token_ids   the prompt          the output              pad_id

    Ids are those that went in and came out of the engine; no text was in between.

    token_ids: the sequences. prompt_lens, lens: tokens of each prompt, and of prompt and output.
    output_mask: True at the output's places; the arrays below are 0 elsewhere.
    logprobs: of each output token, by the model's raw logits, natural logarithm.
    sampling_logprobs: of each output token in what it was drawn from, after temperature, penalties and filters; 0
        where greedy.
    weight_versions: `Engine.weight_version` of the weights that sampled each output token.
    prompt_index: which prompt a row is of. truncated: it ended by its length, or was aborted, not by a stop.
    """

    token_ids: Int32[Array, "R S"]
    prompt_lens: Int32[Array, " R"]
    lens: Int32[Array, " R"]
    output_mask: Bool[Array, "R S"]
    logprobs: Float32[Array, "R S"]
    sampling_logprobs: Float32[Array, "R S"]
    weight_versions: Int32[Array, "R S"]
    prompt_index: Int32[Array, " R"]
    truncated: Bool[Array, " R"]


def rollout(
    engine: Serves,
    prompts: Sequence[Any],
    sampling: SamplingParams,
    *,
    n: int = 1,
    seq_len: int | None = None,
    pad_id: int = 0,
    sharding: Any = None,
    finish_checks: Sequence[FinishCheck | None] = (),
    namespace: Hashable = None,
) -> Rollouts:
    """n samples of each prompt, run to their ends, as padded arrays ready for a loss. Each prompt is computed once.

    sampling: of all; its n and logprobs are set here, and prompt i gets its seed + i, so that no two groups draw
    alike. seq_len: places a row; None: the power of two that takes the longest sequence, 64 at least. pad_id: what
    stands behind a sequence. sharding: where the arrays go, [R, S] and [R] alike (e.g. a NamedSharding over the
    rows); None: the default device. finish_checks: one a prompt, or none.

    Steps serve other requests too, whose outputs reach their streams alone. An interrupt aborts what was begun.

    Raises:
        TypeError, ValueError: as `Engine.add_request`, for the first prompt that is refused, and none runs; no prompts;
            sequences that may exceed seq_len.
    """
    if not len(prompts):
        raise ValueError("no prompts to roll out; give at least one")
    params = dataclasses.replace(sampling, n=n, logprobs=0, prompt_logprobs=None)
    _check_seq_len(prompts, params, seq_len)
    seed = params.seed
    each = [params if seed is None else dataclasses.replace(params, seed=seed + i) for i in range(len(prompts))]
    outputs = run_all(engine, prompts, each, finish_checks=finish_checks, namespace=namespace)
    arrays = pad_rollouts(outputs, seq_len=seq_len, pad_id=pad_id)
    put: Callable[[np.ndarray], jax.Array] = lambda array: jax.device_put(array, sharding)  # noqa: E731
    return jax.tree.map(put, arrays)


def pad_rollouts(outputs: Sequence[RequestOutput], *, seq_len: int | None = None, pad_id: int = 0) -> Rollouts:
    """Finished outputs, with logprobs, as arrays of numpy. seq_len, pad_id: as in `rollout`.

    Raises:
        ValueError: an output without log-probabilities, or longer than seq_len.
    """
    samples = [(i, output, one) for i, output in enumerate(outputs) for one in output.outputs]
    prompt_lens = [len(output.prompt_token_ids) for _, output, _ in samples]
    lens = [prompt_len + len(one.token_ids) for prompt_len, (_, _, one) in zip(prompt_lens, samples, strict=True)]
    seq_len = seq_len or max(_LEAST_SEQ_LEN, 1 << (max(lens) - 1).bit_length())
    if max(lens) > seq_len:
        raise ValueError(f"a sequence of {max(lens)} tokens exceeds seq_len={seq_len}; raise it")
    token_ids = np.full((len(samples), seq_len), pad_id, np.int32)
    logprobs, sampling_logprobs = np.zeros((2, len(samples), seq_len), np.float32)
    versions = np.zeros((len(samples), seq_len), np.int32)
    for row, (_, output, one) in enumerate(samples):
        if one.logprobs is None:
            raise ValueError(
                f"sample {one.index} of request {output.request_id} has no log-probabilities; ask for them"
            )
        prompt, out = slice(0, prompt_lens[row]), slice(prompt_lens[row], lens[row])
        token_ids[row, prompt], token_ids[row, out] = output.prompt_token_ids, one.token_ids
        logprobs[row, out] = [entry[t].logprob for t, entry in zip(one.token_ids, one.logprobs, strict=True)]
        sampling_logprobs[row, out] = one.sampling_logprobs
        versions[row, out] = one.weight_versions
    places, starts, ends = np.arange(seq_len), np.array(prompt_lens, np.int32), np.array(lens, np.int32)
    return Rollouts(
        token_ids=token_ids,
        prompt_lens=starts,
        lens=ends,
        output_mask=(places >= starts[:, None]) & (places < ends[:, None]),
        logprobs=logprobs,
        sampling_logprobs=sampling_logprobs,
        weight_versions=versions,
        prompt_index=np.array([i for i, _, _ in samples], np.int32),
        truncated=np.array([one.finish_reason != "stop" for _, _, one in samples]),
    )


def score(engine: Serves, sequences: Any, namespace: Hashable = None) -> list[Float32[np.ndarray, " T"]]:
    """log p(token j | tokens before it) of each sequence by the model's raw logits, for j = 1 ... T - 1.

    What was scored before, or begins as something that was, is not computed again. It is what the model's own
    forward gives but for rounding: within 1e-5 in float32 and 0.1 in bfloat16, as tests see it. A sequence has
    max_model_len - 1 tokens at most.

    Raises:
        TypeError, ValueError: as `Engine.add_request`, for the first sequence that is refused; none is then scored.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = run_all(engine, sequences, [params] * len(sequences), namespace=namespace)
    scores = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        scores.append(np.array([entry[t].logprob for t, entry in entries if entry is not None], np.float32))
    return scores


def _check_seq_len(prompts: Sequence[Any], params: SamplingParams, seq_len: int | None) -> None:
    """Before anything runs: the longest that a sequence may become has to fit."""
    if seq_len is None:
        return
    longest = max(len(prompt) for prompt in prompts)
    if params.max_tokens is None or longest + params.max_tokens > seq_len:
        raise ValueError(
            f"prompts of up to {longest} tokens and max_tokens={params.max_tokens} may exceed seq_len={seq_len}; raise "
            "it, or lower max_tokens"
        )
