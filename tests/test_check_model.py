"""check-model passes what is right, and names the check that a planted fault fails."""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import typer
from flax import nnx
from tiny import TINY, module_of, random_weights
from typer.testing import CliRunner

from examples.own_model_nnx import GPT, GPTConfig
from radix_jax.check_model import HINTS, CheckResult, ModelReport, check_model, num_checks
from radix_jax.cli_models import check_model as command
from radix_jax.models import registry
from radix_jax.models.base import ModelFamily
from radix_jax.models.llama import LLAMA, Llama, LlamaConfig, forward

ALL_BUT_PAGES = [check for check in HINTS if not check.startswith("page")]
app = typer.Typer()
app.command()(command)


@pytest.fixture(autouse=True)
def own_families() -> Iterator[None]:
    """What a test registers is forgotten."""
    before = list(registry._FAMILIES)
    yield
    registry._FAMILIES[:] = before


def checked(model: Any, up_to: str, params: Any = None) -> list[CheckResult]:
    """The results of all checks up to one; each other engine takes seconds to compile."""
    results: list[CheckResult] = []

    def stop(result: CheckResult) -> None:
        results.append(result)
        if result.check == up_to:
            raise StopIteration

    with pytest.raises(StopIteration):
        check_model(model, params, on_check=stop)
    return results


def statuses(results: list[CheckResult]) -> dict[str, str]:
    return {result.check: result.status for result in results}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultyConfig(LlamaConfig):
    """A Llama whose forward has a fault; the module's own call has none."""

    fault: str


class FaultyLlama(Llama):
    """Query head n reads kv head n % G, in its own call alone."""

    def __call__(self, token_ids: Any) -> Any:
        weights = nnx.to_pure_dict(nnx.state(self))

        def attend(kv: None, _: int, q: Any, k: Any, v: Any) -> Any:
            num_groups = q.shape[1] // k.shape[1]
            k, v = (jnp.tile(each, (1, num_groups, 1))[None] for each in (k, v))
            return kv, jax.nn.dot_product_attention(q[None], k, v, is_causal=True)[0]

        _, hidden = forward(weights, self.config, token_ids, jnp.arange(len(token_ids)), None, attend)
        return hidden @ weights["head"]


def faulty_forward(weights: Any, config: FaultyConfig, token_ids: Any, positions: Any, kv: Any, attend: Any) -> Any:
    def unmasked(kv: Any, layer: int, q: Any, k: Any, v: Any) -> Any:
        kv, _ = attend(kv, layer, q, k, v)
        return kv, jax.nn.dot_product_attention(q[None], k[None], v[None])[0]

    if config.fault == "position off by one":
        is_first = jnp.concatenate([jnp.ones(1, bool), positions[1:] != positions[:-1] + 1])
        row = jnp.cumsum(is_first) - 1
        starts = jnp.zeros_like(positions).at[row].add(jnp.where(is_first, positions, 0))
        positions = positions + (starts[row] > 0)
    if config.fault == "mean along the tokens":
        token_ids = (token_ids + token_ids[0]) % config.vocab_size
    return forward(weights, config, token_ids, positions, kv, unmasked if config.fault == "mask ignored" else attend)


def faulty(fault: str) -> tuple[FaultyConfig, Any]:
    registry.register_family(ModelFamily(name="faulty", config_type=FaultyConfig, forward=faulty_forward))
    config = FaultyConfig(**vars(dataclasses.replace(TINY, num_layers=1)), fault=fault)
    return config, random_weights(config)


def test_a_right_model_passes() -> None:
    registry.register_family(dataclasses.replace(LLAMA, architectures=(), config_type=FaultyConfig))
    config = FaultyConfig(**vars(dataclasses.replace(TINY, num_layers=1)), fault="none")
    results = checked(module_of(config, random_weights(config)), "retraction")
    assert statuses(results) == dict.fromkeys(ALL_BUT_PAGES, "ok")
    for result in results:
        assert result.largest is not None
        assert result.largest <= result.bound < 0.01
        assert not result.message
    assert any(result.largest for result in results), "figures that were measured"


def test_a_position_off_by_one_behind_what_is_cached() -> None:
    model, params = faulty("position off by one")
    found = statuses(checked(model, "chunks", params))
    assert found == {"causal": "ok", "prefill": "ok", "decode": "differs", "cache": "differs", "chunks": "differs"}


def test_attention_that_ignores_the_mask() -> None:
    model, params = faulty("mask ignored")
    [result] = checked(model, "causal", params)
    assert (result.check, result.status, result.message) == ("causal", "differs", HINTS["causal"])
    assert result.largest is not None
    assert result.largest > result.bound


def test_query_heads_on_the_wrong_kv_heads() -> None:
    module = module_of(TINY, random_weights(TINY))
    assert checked(module, "own forward")[-1].status == "ok"
    graph, state = nnx.split(nnx.eval_shape(lambda: FaultyLlama(TINY, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, random_weights(TINY))
    found = checked(nnx.merge(graph, state), "own forward")
    assert statuses(found) == {"causal": "ok", "own forward": "differs"}
    assert "(n reads n // (N // G))" in found[-1].message


def test_rows_of_a_step_that_touch_each_other() -> None:
    model, params = faulty("mean along the tokens")
    found = statuses(checked(model, "batch", params))
    assert found["causal"] == found["prefill"] == "ok"
    assert found["batch"] == "differs"


def test_what_a_model_raises_is_its_result() -> None:
    config, _ = faulty("none")

    def broken(weights: Any, config: Any, token_ids: Any, positions: Any, kv: Any, attend: Any) -> Any:
        if kv is not None:
            raise ZeroDivisionError("no pool for me\nand more")
        return faulty_forward(weights, config, token_ids, positions, kv, attend)

    registry._FAMILIES[-1] = ModelFamily(name="broken", config_type=FaultyConfig, forward=broken)
    report = check_model(config, random_weights(config), name="mine")
    assert report.failed == tuple(check for check in HINTS if check not in ("causal", "own forward"))
    assert {check.message for check in report.checks if check.check in report.failed} == {
        "ZeroDivisionError: no pool for me"
    }
    assert report.as_text().splitlines()[0] == "prefill: raised, ZeroDivisionError: no pool for me"
    assert report.summary() == "mine in float32 on cpu: 1 ok, 9 not; begin with 'prefill'"


def test_a_context_that_is_too_short_is_refused() -> None:
    module = GPT(GPTConfig(max_position_embeddings=64), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the model has 64 positions, the checks take 96"):
        check_model(module)


def test_an_infinite_difference_is_a_string_in_json() -> None:
    check = CheckResult("cache", "this and that", "differs", float("inf"), 0.1, "look")
    report = ModelReport("mine", "cpu", "float32", (check,)).as_dict()
    assert json.loads(json.dumps(report))["checks"][0]["largest"] == "inf"
    assert not report["passed"]


MINE = """
import dataclasses
from radix_jax.models.base import ModelFamily
from radix_jax.models.llama import LLAMA
from radix_jax.models.registry import register_family
from tiny import TINY, random_weights

@dataclasses.dataclass(frozen=True, kw_only=True)
class MyConfig(type(TINY)):
    pass

def forward(weights, config, token_ids, positions, kv, attend):
    if kv is not None:
        raise ZeroDivisionError("not [today]")
    return LLAMA.forward(weights, config, token_ids, positions, kv, attend)

register_family(ModelFamily(name="mine", config_type=MyConfig, forward=forward))

def broken():
    config = MyConfig(**vars(TINY))
    return config, random_weights(config)

def nothing():
    return 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the current folder."""
    (tmp_path / "my_models.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_models", raising=False)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("my_models:nothing", r"my_models:nothing gave a int, not \(module or config, params or None\)"),
        ("my_models:nobody", "my_models has no function 'nobody'"),
        ("no_models:nobody", "no_models can't be imported from .*ModuleNotFoundError"),
    ],
)
def test_a_model_that_is_not_there(model: str, message: str) -> None:
    done = CliRunner().invoke(app, [model])
    assert isinstance(done.exception, ValueError)
    with pytest.raises(ValueError, match=message):
        raise done.exception


@pytest.mark.slow
@pytest.mark.parametrize("model", ["examples.own_model_nnx:tiny", "examples.own_model_linen:tiny"])
def test_the_command_passes_the_examples(model: str) -> None:
    done = CliRunner().invoke(app, [model, "--json"])
    report = json.loads(done.stdout)
    assert (done.exit_code, report["passed"], report["model"]) == (0, True, model)
    names = [check["check"] for check in report["checks"]]
    assert names == [check for check in HINTS if "nnx" in model or check != "own forward"]
    assert all(check["largest"] <= check["bound"] for check in report["checks"])
    shown = CliRunner().invoke(app, [model]).stdout
    assert shown.endswith(f"{model} in float32 on cpu: {len(names)} ok\n")
    assert all(name in shown for name in names)


@pytest.mark.slow
def test_the_command_takes_a_folder(tmp_path: Path) -> None:
    from tiny_llm import write_folder

    done = CliRunner().invoke(app, [str(write_folder(tmp_path))])
    assert done.exit_code == 0, done.stdout
    assert " in float32 on cpu: 10 ok" in done.stdout


@pytest.mark.usefixtures("mine")
def test_the_command_shows_what_failed() -> None:
    done = CliRunner().invoke(app, ["my_models:broken"])
    assert done.exit_code == 1
    assert re.search(r"decode +│ tokens one by one, and dense attention +│ +- │ \d.\de-0\d │ raised", done.stdout)
    assert "prefill: raised, ZeroDivisionError: not [today]\n" in done.stdout
    assert done.stdout.endswith("my_models:broken in float32 on cpu: 1 ok, 9 not; begin with 'prefill'\n")


def test_the_number_of_checks_is_told_before() -> None:
    assert num_checks(TINY) == len(HINTS) - 1
    assert num_checks(module_of(TINY, random_weights(TINY))) == len(HINTS)
