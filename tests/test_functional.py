"""The pure core: every way to cut the same tokens into steps gives the logits of the dense model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MAX_LEN, TINY, dense_logits, module_of, random_prompts, random_weights, tiny_llama

from radix_jax.arrays import StepInputs
from radix_jax.functional import MAX_SLOTS, decode, init_kv, kv_width, prefill
from radix_jax.models.base import ModelParams
from radix_jax.models.llama import LlamaConfig
from radix_jax.models.registry import params_of
from radix_jax.plan import Bucket, StepPlan, StepRow
from radix_jax.request import Request, SamplingParams
from radix_jax.runner.pack import Packer

NUM_PAGES, PAGE_SIZE = 120, 4
# One shape for everything here, so that each model compiles two programs.
PREFILL = Bucket("prefill", 96, 4, MAX_LEN // PAGE_SIZE)
DECODE = Bucket("decode", 4, 4, MAX_LEN // PAGE_SIZE)
STEPS = {"prefill": jax.jit(prefill), "decode": jax.jit(decode)}
# Logits spread by 1; the dense and the paged forms add the same numbers in another order.
TOLERANCE = 1e-5
CONFIGS = {
    "gqa": TINY,
    "mqa_tied": dataclasses.replace(TINY, num_kv_heads=1, tie_word_embeddings=True),
    "mha_wide": dataclasses.replace(TINY, num_heads=2, num_kv_heads=2, head_dim=80),
}


def step_inputs(
    bucket: Bucket, rows: Sequence[tuple[np.ndarray, int, np.ndarray]], config: LlamaConfig = TINY
) -> StepInputs:
    """rows: (token ids to compute, their start, all pages of the row)."""
    plan_rows = []
    for ids, start, pages in rows:
        used = pages[: -(-(start + len(ids)) // PAGE_SIZE)]
        request = Request(
            request_id="",
            token_ids=ids,
            sampling=SamplingParams(),
            max_tokens=1,
            stop_ids=frozenset(),
            seed=0,
            arrival=0,
        )
        plan_rows.append(StepRow(request=request, token_ids=ids, start=start, pages=used, samples=True))
    plan = StepPlan(kind=bucket.kind, rows=tuple(plan_rows), bucket=bucket, num_prompt_rows=0)
    return Packer(page_size=PAGE_SIZE, num_slots=config.num_layers * NUM_PAGES * PAGE_SIZE).pack(plan).inputs


def spread_pages(num_rows: int, seed: int = 0) -> list[np.ndarray]:
    """Page ids of each row, in no order, no two alike."""
    per_row = (NUM_PAGES - 1) // num_rows
    pages = np.random.default_rng(seed).permutation(np.arange(1, NUM_PAGES)).astype(np.int32)
    return [pages[row * per_row : (row + 1) * per_row] for row in range(num_rows)]


def dense_rows(module: Any, prompt: np.ndarray) -> np.ndarray:
    """Logits [T, V] of a prompt by the module itself."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(prompt)] = prompt
    return np.asarray(dense_logits(module)(jnp.asarray(padded)))[: len(prompt)]


def run(params: ModelParams, kv: jax.Array, bucket: Bucket, rows: Any) -> tuple[jax.Array, np.ndarray]:
    kv, logits = STEPS[bucket.kind](params, kv, step_inputs(bucket, rows, params.config))
    return kv, np.asarray(logits)[: len(rows)]


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_chunked_and_decoded_are_the_dense_model(name: str) -> None:
    config = CONFIGS[name]
    module = module_of(config, random_weights(config, seed=1))
    params = params_of(module)
    prompt = random_prompts(1, lens=(75, 76), seed=2)[0]
    expected = dense_rows(module, prompt)
    empty = init_kv(config, NUM_PAGES, PAGE_SIZE)
    [pages] = spread_pages(1)

    kv, logits = run(params, empty, PREFILL, [(prompt, 0, pages)])
    np.testing.assert_allclose(logits[0], expected[-1], rtol=0, atol=TOLERANCE)
    pools = [kv]

    kv = empty
    for start, end in zip((0, 7, 8, 40), (7, 8, 40, 75), strict=True):
        kv, logits = run(params, kv, PREFILL, [(prompt[start:end], start, pages)])
        np.testing.assert_allclose(logits[0], expected[end - 1], rtol=0, atol=TOLERANCE)
    pools.append(kv)

    kv, _ = run(params, empty, PREFILL, [(prompt[:50], 0, pages)])
    for place in range(50, 75):
        kv, logits = run(params, kv, DECODE, [(prompt[place : place + 1], place, pages)])
        np.testing.assert_allclose(logits[0], expected[place], rtol=0, atol=TOLERANCE)
    pools.append(kv)

    for pool in pools[1:]:
        np.testing.assert_allclose(pool, pools[0], rtol=0, atol=TOLERANCE)


def test_ragged_rows_are_independent() -> None:
    params = params_of(tiny_llama())
    prompts = random_prompts(3, lens=(1, 32), seed=3)
    pages = spread_pages(3)
    kv = init_kv(TINY, NUM_PAGES, PAGE_SIZE)
    # The first row goes on after a prefix that lies in the pool already; the others are whole.
    kv, _ = run(params, kv, PREFILL, [(prompts[0][:-1], 0, pages[0])])
    rows = [(prompts[0][-1:], len(prompts[0]) - 1, pages[0])]
    rows += [(prompt, 0, page_ids) for prompt, page_ids in zip(prompts[1:], pages[1:], strict=True)]
    kv, logits = run(params, kv, PREFILL, rows)
    for prompt, row in zip(prompts, logits, strict=True):
        np.testing.assert_allclose(row, dense_rows(tiny_llama(), prompt)[-1], rtol=0, atol=TOLERANCE)
    tokens = [np.array([row.argmax()], np.int32) for row in logits]
    decode_rows = [
        (token, len(prompt), page_ids) for token, prompt, page_ids in zip(tokens, prompts, pages, strict=True)
    ]
    _, logits = run(params, kv, DECODE, decode_rows)
    for prompt, token, row in zip(prompts, tokens, logits, strict=True):
        expected = dense_rows(tiny_llama(), np.append(prompt, token))[-1]
        np.testing.assert_allclose(row, expected, rtol=0, atol=TOLERANCE)


def test_eager_jitted_and_device_inputs_agree() -> None:
    params = params_of(tiny_llama())
    prompt, pages = random_prompts(1, lens=(20, 21), seed=4)[0], spread_pages(1)[0]
    kv, _ = run(params, init_kv(TINY, NUM_PAGES, PAGE_SIZE), PREFILL, [(prompt[:-1], 0, pages)])
    before = np.asarray(kv).copy()
    inputs = step_inputs(DECODE, [(prompt[-1:], len(prompt) - 1, pages)])
    jitted_kv, jitted = STEPS["decode"](params, kv, inputs)
    for step, these in ((decode, inputs), (STEPS["decode"], jax.tree.map(jnp.asarray, inputs))):
        same_kv, logits = step(params, kv, these)
        np.testing.assert_allclose(logits[0], jitted[0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(same_kv, jitted_kv, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(kv, before)


def test_lengths_are_data_one_trace_serves_all() -> None:
    chex.clear_trace_counter()
    params, kv = params_of(tiny_llama()), init_kv(TINY, NUM_PAGES, PAGE_SIZE)
    steps: list[tuple[Bucket, Callable[..., Any]]] = [
        (PREFILL, jax.jit(chex.assert_max_traces(prefill, n=1))),
        (DECODE, jax.jit(chex.assert_max_traces(decode, n=1))),
    ]
    for bucket, step in steps:
        for q_lens in ((1,), (1, 1, 1), (1, 1)) if bucket is DECODE else ((96,), (1, 90, 3, 2), (5, 5)):
            rows = [
                (np.arange(q_len, dtype=np.int32), 3 * row, pages)
                for row, (q_len, pages) in enumerate(zip(q_lens, spread_pages(4), strict=False))
            ]
            kv, logits = step(params, kv, step_inputs(bucket, rows))
            chex.assert_shape(logits, (4, TINY.vocab_size))
            chex.assert_type(logits, jnp.float32)
            assert np.isfinite(logits[: len(q_lens)]).all()


def layer_kv(kv: jax.Array, layer: int, pages: np.ndarray, num_tokens: int) -> np.ndarray:
    """K and V lanes [T, W] of a row's tokens in one layer."""
    lanes = np.asarray(kv)[layer * NUM_PAGES + pages].reshape(-1, kv_width(TINY))
    return lanes[:num_tokens]


def test_why_only_prefixes_can_be_shared() -> None:
    """Layer 0 sees only the token and its position, every later layer all that came before. So KV may be taken from
    another request only if all tokens in front are the same."""
    config = dataclasses.replace(TINY, num_layers=3)
    params = params_of(config, random_weights(config, seed=7))
    one = random_prompts(1, lens=(40, 41), seed=6)[0]
    other = one.copy()
    other[0] = (other[0] + 1) % TINY.vocab_size
    pages = spread_pages(2)
    kv = init_kv(config, NUM_PAGES, PAGE_SIZE)
    kv, _ = run(params, kv, PREFILL, [(one, 0, pages[0]), (other, 0, pages[1])])

    def both(layer: int) -> tuple[np.ndarray, np.ndarray]:
        return layer_kv(kv, layer, pages[0], len(one)), layer_kv(kv, layer, pages[1], len(one))

    first, second = both(0)
    assert np.abs(first[0] - second[0]).max() > 0.1
    np.testing.assert_allclose(first[1:], second[1:], rtol=0, atol=1e-6)
    for layer in (1, 2):
        first, second = both(layer)
        assert (np.abs(first - second).max(axis=1) > 1e-3).all()

    # With the same prefix all layers agree, and at another position not even the first one does.
    shifted = np.concatenate([one[:1], one])[: len(one)]
    kv, _ = run(params, kv, PREFILL, [(one, 0, pages[1])])
    for layer in range(3):
        first, second = both(layer)
        np.testing.assert_allclose(first, second, rtol=0, atol=1e-5)
    kv, _ = run(params, kv, PREFILL, [(shifted, 0, pages[1])])
    first, second = both(0)
    assert (np.abs(first[:-1] - second[1:]).max(axis=1) > 1e-3).all()


def test_a_fresh_pool() -> None:
    kv = init_kv(TINY, 5, 16)
    chex.assert_shape(kv, (2 * 5, 16, 2 * 2 * 16))
    chex.assert_type(kv, jnp.float32)
    assert not np.asarray(kv).any()
    assert init_kv(TINY, 5, 16, "bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("num_pages", "page_size", "message"),
    [
        (1, 16, "num_pages=1, page_size=16: a pool needs 2 pages"),
        (5, 0, "page_size=0"),
        (MAX_SLOTS, 16, f"2 layers x {MAX_SLOTS} pages x 16 tokens exceed {MAX_SLOTS} slots; lower num_pages"),
    ],
)
def test_pools_that_can_not_be(num_pages: int, page_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        init_kv(TINY, num_pages, page_size)


def test_decode_takes_one_token_a_row() -> None:
    params, kv = params_of(tiny_llama()), init_kv(TINY, NUM_PAGES, PAGE_SIZE)
    with pytest.raises(ValueError, match="one token a row, got 96 tokens in 4 rows; use prefill"):
        decode(params, kv, step_inputs(PREFILL, [(np.arange(5, dtype=np.int32), 0, spread_pages(1)[0])]))


@pytest.mark.parametrize("other", [{"num_kv_heads": 4}, {"head_dim": 8}, {"num_layers": 7}])
def test_a_pool_of_another_model_is_refused(other: dict[str, int]) -> None:
    params = params_of(tiny_llama())
    kv = init_kv(dataclasses.replace(TINY, **other), 3, PAGE_SIZE)
    inputs = step_inputs(DECODE, [(np.arange(1, dtype=np.int32), 0, spread_pages(1)[0])])
    with pytest.raises(AssertionError, match=r"shape|divisible"):
        decode(params, kv, inputs)


@pytest.mark.parametrize("name", ["positions", "write_slots", "kv_lens", "cu_q_lens"])
def test_inputs_of_different_lengths_are_refused(name: str) -> None:
    params, kv = params_of(tiny_llama()), init_kv(TINY, NUM_PAGES, PAGE_SIZE)
    inputs = step_inputs(PREFILL, [(np.arange(5, dtype=np.int32), 0, spread_pages(1)[0])])
    # Past the constructor, whose own check is one of tests alone.
    object.__setattr__(inputs, name, getattr(inputs, name)[:-1])
    with pytest.raises(AssertionError, match="shape"):
        prefill(params, kv, inputs)


def test_both_steps_lower_for_accelerators() -> None:
    params, kv = params_of(tiny_llama()), init_kv(TINY, NUM_PAGES, PAGE_SIZE)
    for bucket, step in ((PREFILL, prefill), (DECODE, decode)):
        inputs = step_inputs(bucket, [(np.arange(1, dtype=np.int32), 0, spread_pages(1)[0])])
        exported = jax.export.export(jax.jit(step), platforms=["cpu", "cuda", "tpu"])(params, kv, inputs)
        assert exported.platforms == ("cpu", "cuda", "tpu")
        assert [aval.shape for aval in exported.out_avals] == [kv.shape, (4, TINY.vocab_size)]
