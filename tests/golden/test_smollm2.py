"""The real model against what transformers gives for it, in float32: first logits, and 32 greedy ids of each prompt."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import assert_idle, generate, token_ids

from radix_jax import LLM, Engine, EngineConfig, SamplingParams
from radix_jax.functional import init_kv, prefill
from radix_jax.plan import Bucket, StepPlan, StepRow
from radix_jax.request import Request
from radix_jax.runner.pack import Packer

# Minutes where the machine has other work too.
pytestmark = pytest.mark.timeout(900)

GOLDEN = json.loads((Path(__file__).parent / "smollm2-135m-instruct.json").read_text())["prompts"]
PROMPTS = [np.array(prompt["prompt_token_ids"], np.int32) for prompt in GOLDEN]
GREEDY_IDS = [prompt["greedy_token_ids"] for prompt in GOLDEN]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
LOGITS_TOLERANCE = 2e-3
# Two programs of 30 layers serve everything: prompts in chunks of at most 64 tokens, and 16 rows that decode.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_pages": 600,
    "max_model_len": 256,
    "max_running_requests": 16,
    "max_prefill_tokens": 64,
}
PAGE_SIZE = 16


@dataclass(frozen=True)
class Real:
    """The model by its name, and an engine without the cache over the same weights."""

    llm: LLM
    uncached: Engine


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    with LLM("smollm2-135m-instruct", page_size=PAGE_SIZE, **SETTINGS) as llm:
        config = EngineConfig(page_size=PAGE_SIZE, enable_prefix_cache=False, **SETTINGS)
        yield Real(llm, Engine(llm.engine.params.config, llm.engine.params, config))


def test_first_logits(real: Real) -> None:
    """All prompts as rows of one step of the pure core."""
    params = real.llm.engine.params
    rows, next_page = [], 1
    for prompt in PROMPTS:
        request = Request(
            request_id="", token_ids=prompt, sampling=GREEDY, max_tokens=1, stop_ids=frozenset(), seed=0, arrival=0
        )
        num_pages = -(-len(prompt) // PAGE_SIZE)
        pages = np.arange(next_page, next_page + num_pages, dtype=np.int32)
        next_page += num_pages
        rows.append(StepRow(request=request, token_ids=prompt, start=0, pages=pages, samples=True))
    bucket = Bucket("prefill", 512, len(rows), num_pages=10)
    packer = Packer(page_size=PAGE_SIZE, num_slots=params.config.num_layers * next_page * PAGE_SIZE)
    inputs = packer.pack(StepPlan("prefill", tuple(rows), bucket, len(rows))).inputs
    kv = init_kv(params.config, next_page, PAGE_SIZE)
    _, logits = jax.jit(prefill, donate_argnums=1)(params, kv, inputs)
    for row, golden in zip(np.asarray(logits), GOLDEN, strict=True):
        top10 = np.array(golden["first_top10_ids"])
        np.testing.assert_allclose(row[top10], golden["first_top10_logits"], rtol=0, atol=LOGITS_TOLERANCE)
        assert set(np.argsort(row)[-10:].tolist()) == set(top10.tolist())
        assert row.argmax() == top10[0] == golden["greedy_token_ids"][0]


def test_greedy_ids_cold_and_from_the_cache(real: Real) -> None:
    cold = generate(real.llm.engine, PROMPTS, GREEDY)
    assert token_ids(cold) == GREEDY_IDS
    warm = generate(real.llm.engine, PROMPTS, GREEDY)
    assert token_ids(warm) == GREEDY_IDS
    assert [output.cached_tokens for output in warm] == [len(prompt) - 1 for prompt in PROMPTS]
    # Two of the chats begin with the same system prompt.
    assert sum(output.cached_tokens for output in cold) >= 64
    assert_idle(real.llm.engine)


@pytest.mark.slow
def test_greedy_ids_without_the_cache(real: Real) -> None:
    outputs = generate(real.uncached, PROMPTS, GREEDY)
    assert token_ids(outputs) == GREEDY_IDS
    assert not any(output.cached_tokens for output in outputs)


def test_text_goes_in_and_comes_out(real: Real) -> None:
    """Special tokens of the output are ids, and no text."""
    texts = [prompt for prompt in GOLDEN if "text" in prompt]
    chats = [prompt for prompt in GOLDEN if "messages" in prompt]
    few = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    outputs = real.llm.generate([prompt["text"] for prompt in texts], few)
    outputs += real.llm.chat([prompt["messages"] for prompt in chats], few)
    for output, golden in zip(outputs, texts + chats, strict=True):
        assert output.prompt_token_ids == golden["prompt_token_ids"]
        assert output.outputs[0].token_ids == golden["greedy_token_ids"][:4]
        text = golden["greedy_text"].replace("<|im_start|>", "").replace("<|im_end|>", "")
        assert output.outputs[0].text != ""
        assert text.startswith(output.outputs[0].text)


@pytest.mark.slow
def test_greedy_ids_alone(real: Real) -> None:
    real.llm.flush_cache()
    for engine in (real.llm.engine, real.llm.engine, real.uncached):
        outputs = [generate(engine, [prompt], GREEDY)[0] for prompt in PROMPTS]
        assert token_ids(outputs) == GREEDY_IDS


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"page_size": 1, "num_pages": 4000}, {"page_size": 4, "max_prefill_tokens": 512}])
def test_greedy_ids_with_other_pages(real: Real, fields: dict[str, int]) -> None:
    params = real.llm.engine.params
    engine = Engine(params.config, params, EngineConfig(**(SETTINGS | fields)))
    for _ in range(2):
        assert token_ids(generate(engine, PROMPTS, GREEDY)) == GREEDY_IDS
    assert_idle(engine)
    engine.close()
