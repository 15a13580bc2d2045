"""The oracle of requests that lived through new weights: each token anew, from KV that several weights computed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny import MAX_LEN, MIN_TOP2_GAP, gumbel_noise

from radix_jax import Engine, Logprob, RequestOutput
from radix_jax.arrays import StepInputs
from radix_jax.functional import decode, init_kv
from radix_jax.models.base import ModelParams

_PAGE_SIZE = 16


def check_output(engine: Engine, output: RequestOutput, params: Sequence[ModelParams], seed: int | None = None) -> None:
    """Check each token of each sample, by `params[v]` for weights of version v. seed: of a request with temperature 1;
    None: it is greedy.

    Which weights computed which KV is read from what the engine tells of the request, step by step.
    """
    for completion in output.outputs:
        name = output.request_id + (f".{completion.index}" if completion.index else "")
        versions = completion.weight_versions
        assert len(versions) == len(completion.token_ids)
        ids = np.array([*output.prompt_token_ids, *completion.token_ids], np.int32)
        logits = np.empty(0)
        for kv_versions, first, end in _lives(engine, name, len(output.prompt_token_ids), versions):
            logits = mixed_logits(params, ids, kv_versions)
            for place in range(first, end):
                drawn = logits[place - 1]
                if seed is not None:
                    drawn = drawn + gumbel_noise(seed, completion.index, place, len(drawn))
                second, best = np.sort(drawn)[-2:]
                assert best - second > MIN_TOP2_GAP, f"{name}: the best tokens at {place} are {best - second} apart"
                assert ids[place] == drawn.argmax(), f"{name}: token {place} of {len(ids)}, weights {versions}"
        if completion.index == 0 and output.prompt_logprobs is not None:
            _check_prompt(output.prompt_token_ids, output.prompt_logprobs, logits)


def _check_prompt(ids: list[int], entries: Sequence[dict[int, Logprob] | None], logits: np.ndarray) -> None:
    """The log-probabilities of a prompt are those by the KV, and the weights, that computed it last."""
    for place, (token_id, entry) in enumerate(zip(ids, entries, strict=True)):
        if entry is not None:
            row = logits[place - 1].astype(np.float64)
            assert abs(entry[token_id].logprob - row[token_id] + np.log(np.exp(row).sum())) < 1e-4


def _lives(engine: Engine, name: str, prompt_len: int, versions: list[int]) -> list[tuple[list[int], int, int]]:
    """(the weights that computed each KV, first and end of the tokens sampled from it), once for each time that the
    sample was let in."""
    version, computed, lives = 0, [], []
    for event in engine.explain(name).events:
        if event.kind == "new weights":
            version = int(str(event.detail).removeprefix("version "))
        elif event.kind == "restarted":
            lives = []
        elif event.kind == "admitted":
            computed = [version] * event.end
            lives.append(computed)
        elif event.kind == "chunk":
            assert event.start == len(computed), "KV is computed that was there"
            computed += [version] * (event.end - event.start)
    num_tokens = prompt_len + len(versions)
    firsts = [len(life) for life in lives]
    ends = [*firsts[1:], num_tokens]
    return [
        (life + versions[first + 1 - prompt_len : end - prompt_len], first, end)
        for life, first, end in zip(lives, firsts, ends, strict=True)
        if end > first >= prompt_len
    ]


def mixed_logits(params: Sequence[ModelParams], ids: np.ndarray, versions: Sequence[int]) -> np.ndarray:
    """[MAX_LEN, V]: the logits behind each token, where params[versions[p]] compute the one at p, token by token."""
    padded = np.zeros((2, MAX_LEN), np.int32)
    padded[0, : len(ids)] = ids
    padded[1, : len(versions)] = versions
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    return np.asarray(_run(stacked, *padded))


@jax.jit
def _run(stacked: Any, ids: jax.Array, versions: jax.Array) -> jax.Array:
    num_pages = MAX_LEN // _PAGE_SIZE
    pages = jnp.arange(1, num_pages + 1, dtype=jnp.int32)

    def step(kv: jax.Array, at: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token_id, version, place = at
        inputs = StepInputs(
            token_ids=token_id[None],
            positions=place[None],
            page_table=pages[None],
            kv_lens=place[None] + 1,
            cu_q_lens=jnp.arange(2, dtype=jnp.int32),
            write_slots=_PAGE_SIZE + place[None],
        )
        kv, logits = decode(jax.tree.map(lambda leaf: leaf[version], stacked), kv, inputs)
        return kv, logits[0]

    kv = init_kv(stacked.config, num_pages + 1, _PAGE_SIZE)
    return jax.lax.scan(step, kv, (ids, versions, jnp.arange(MAX_LEN, dtype=jnp.int32)))[1]
