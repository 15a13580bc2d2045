"""The models of one's own give in the engine what they give densely, and the docs show their very text."""

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MIN_TOP2_GAP, finish, greedy

from examples import own_model_linen, own_model_nnx
from radix_jax import Engine, EngineConfig

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_model.md").read_text(), flags=re.DOTALL)
NUM_TOKENS, DENSE_LEN = 6, 48
FORMS = {"nnx": own_model_nnx.tiny, "linen": own_model_linen.tiny}


def dense_call(form: str) -> Callable[[jax.Array], jax.Array]:
    """The model's own logits of every position."""
    model, params = FORMS[form]()
    return jax.jit(model if form == "nnx" else lambda ids: own_model_linen.dense(params, model, ids))


def dense_greedy(form: str, prompt: np.ndarray) -> list[int]:
    """Each token from the whole sequence anew; refuses what hangs on rounding."""
    logits_of, ids = dense_call(form), np.zeros(DENSE_LEN, np.int32)
    ids[: len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + NUM_TOKENS):
        logits = np.asarray(logits_of(jnp.asarray(ids)))[end - 1]
        second, first = np.sort(logits)[-2:]
        assert first - second > MIN_TOP2_GAP
        ids[end] = logits.argmax()
    return ids[len(prompt) : len(prompt) + NUM_TOKENS].tolist()


@pytest.fixture(params=list(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    """Of the model."""
    return request.param


def test_the_engine_gives_what_the_model_gives(form: str) -> None:
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 96, 30).astype(np.int32)
    prompts = [np.concatenate([stem, rng.integers(0, 96, num).astype(np.int32)]) for num in (1, 9)]
    engine = Engine(*FORMS[form](), EngineConfig(num_pages=32, max_running_requests=8))
    for _ in range(2):
        ids = [engine.add_request(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
        outputs = finish(engine)
        found = [outputs[i].outputs[0].token_ids for i in ids]
        assert found == [dense_greedy(form, prompt) for prompt in prompts]
        assert len(set(map(tuple, found))) == 2
    assert [outputs[i].cached_tokens for i in ids] == [30, 38]
    engine.close()


def test_they_are_as_short_as_promised(form: str) -> None:
    lines = (ROOT / "examples" / f"own_model_{form}.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 60


def test_the_docs_show_the_examples_own_text() -> None:
    *shown, run = BLOCKS
    nnx, linen = ((ROOT / "examples" / f"own_model_{form}.py").read_text() for form in FORMS)
    assert [block in nnx for block in shown] == [True] * (len(shown) - 1) + [False]
    assert shown[-1] in linen
    assert len(shown) == 5
    assert run not in nnx


def test_what_the_docs_run(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[-1], {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("0 of 40 prompt tokens came from the cache: [")
    assert second == first.replace("0 of", "39 of", 1)
