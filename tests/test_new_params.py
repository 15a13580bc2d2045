"""What `update_params` takes: the forms that Engine takes, without copies, and nothing but the same model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mixed_weights import check_output
from tiny import SMALL, TINY, dense_greedy, finish, generate, greedy, module_of, random_weights, share_programs

from radix_jax import LLM, Engine, EngineConfig
from radix_jax.models.base import ModelParams
from radix_jax.models.llama import Llama
from radix_jax.models.registry import params_of

TIED = dataclasses.replace(TINY, tie_word_embeddings=True)
OLD = {config: module_of(config, random_weights(config)) for config in (TINY, TIED)}
PROMPT = [1, 2, 3, 4, 5, 6, 7]

FORMS: dict[str, Callable[[Llama], Any]] = {
    "module": lambda module: module,
    "state": lambda module: nnx.state(module),
    "dict": lambda module: nnx.to_pure_dict(nnx.state(module)),
    "params": params_of,
}


def make_engine(config: Any = TINY) -> Engine:
    return share_programs(Engine(OLD[config], None, EngineConfig(**SMALL)), OLD[config])


def weights_of(module: Llama) -> dict[Any, Any]:
    return nnx.to_pure_dict(nnx.state(module))


def addresses(tree: Any) -> set[int]:
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", [TINY, TIED], ids=["own_head", "tied"])
def test_every_form_is_taken_without_a_copy(config: Any, form: str) -> None:
    new = module_of(config, random_weights(config, seed=1))
    engine = make_engine(config)
    engine.update_params(FORMS[form](new))
    own = addresses(weights_of(new))
    assert addresses(engine.params.weights) == own
    derived = addresses(engine.params) - own
    assert len(derived) == (config is TIED), "the transposed head of a tied model lies beside its embedding"
    [output] = generate(engine, [PROMPT], greedy(5))
    assert output.outputs[0].token_ids == dense_greedy(PROMPT, 5, new)


def test_leaves_of_the_host_go_to_the_device() -> None:
    new = module_of(TINY, random_weights(TINY, seed=1))
    engine = make_engine()
    engine.update_params(jax.tree.map(np.asarray, weights_of(new)))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(engine.params))
    [output] = generate(engine, [PROMPT], greedy(5))
    assert output.outputs[0].token_ids == dense_greedy(PROMPT, 5, new)


def test_an_llm_passes_it_on() -> None:
    new = module_of(TINY, random_weights(TINY, seed=1))
    with LLM(OLD[TINY], **SMALL) as llm:
        share_programs(llm.engine, OLD[TINY])
        llm.update_params(new, on_update="abort")
        assert llm.engine.weight_version == 1
        [output] = llm.generate([PROMPT], greedy(5))
    assert output.outputs[0].token_ids == dense_greedy(PROMPT, 5, new)
    assert output.outputs[0].weight_versions == [1] * 5


def with_leaf(name: str, leaf: Any) -> Callable[[], Any]:
    return lambda: random_weights(TINY, seed=1) | {name: leaf}


def without(name: str) -> dict[Any, Any]:
    return {key: leaf for key, leaf in random_weights(TINY).items() if key != name}


def deleted() -> dict[Any, Any]:
    weights = random_weights(TINY, seed=1)
    weights["layers"][1]["q_proj"].delete()
    return weights


def donated() -> dict[Any, Any]:
    weights = random_weights(TINY, seed=1)
    jax.block_until_ready(jax.jit(lambda leaf: leaf + 1, donate_argnums=0)(weights["norm"]))
    return weights


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dtype": (
        with_leaf("embed", jnp.zeros((512, 64), jnp.bfloat16)),
        ValueError,
        r"leaf embed is bfloat16\[512, 64\], the engine's is float32\[512, 64\]",
    ),
    "float64": (
        with_leaf("norm", np.zeros(64)),
        ValueError,
        r"leaf norm is float64\[64\], the engine's is float32\[64\]",
    ),
    "shape": (
        with_leaf("embed", jnp.zeros((510, 64))),
        ValueError,
        r"leaf embed is float32\[510, 64\], the engine's is float32\[512, 64\]",
    ),
    "missing": (lambda: without("norm"), ValueError, r"params lack the leaf norm, in the engine float32\[64\]"),
    "extra": (
        with_leaf("bias", jnp.zeros(3)),
        ValueError,
        r"params hold the leaf bias, float32\[3\], which the engine's have not",
    ),
    "deleted": (
        deleted,
        ValueError,
        r"leaf layers.1.q_proj, float32\[.*\], was deleted, or donated to a jitted function",
    ),
    "donated": (donated, ValueError, r"leaf norm, float32\[64\], was deleted, or donated"),
    "no_array": (with_leaf("norm", 1.0), TypeError, "leaf norm is a float; give arrays that hold values"),
    "abstract": (
        lambda: jax.eval_shape(lambda: random_weights(TINY)),
        TypeError,
        "is a ShapeDtypeStruct; give arrays that hold values",
    ),
    "list": (lambda: [1], TypeError, "params are a list; give a module, its nnx.State or nested dict, or ModelParams"),
    "other_config": (lambda: OLD[TIED], ValueError, "of another config than the engine's"),
    "other_config_params": (lambda: params_of(OLD[TIED]), ValueError, "of another config than the engine's"),
    "other_head": (
        lambda: ModelParams(random_weights(TINY), jnp.zeros((64, 500)), TINY),
        ValueError,
        r"leaf head is float32\[64, 500\], the engine's is float32\[64, 512\]",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(what: str) -> None:
    engine = make_engine()
    generate(engine, [PROMPT], greedy(2))
    request_id = engine.add_request(PROMPT, greedy(5))
    engine.step()
    make, error, message = REFUSED[what]
    before = addresses(engine.params)
    with pytest.raises(error, match=message):
        engine.update_params(make(), on_update="abort")
    assert engine.weight_version == 0
    assert addresses(engine.params) == before
    output = finish(engine)[request_id]
    assert output.cached_tokens > 0
    assert output.outputs[0].token_ids == dense_greedy(PROMPT, 5)


def test_params_of_a_jitted_function_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match=r"is a .*Tracer; give arrays that hold values"):
        jax.jit(lambda weights: engine.update_params(weights))(random_weights(TINY, seed=1))
    assert engine.weight_version == 0


def test_a_trainer_may_donate_the_params_between_updates() -> None:
    """As long as no step is sent meanwhile: the step in flight has them already."""
    weights = random_weights(TINY)
    engine = share_programs(Engine(TINY, weights, EngineConfig(**SMALL)), OLD[TINY])
    request_id = engine.add_request(PROMPT, greedy(9))
    for _ in range(3):
        engine.step()
    old = jax.tree.map(jnp.copy, engine.params)
    train = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1.25, tree), donate_argnums=0)
    weights = train(weights)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(engine.params))
    engine.update_params(weights)
    output = finish(engine)[request_id]
    assert set(output.outputs[0].weight_versions) == {0, 1}
    check_output(engine, output, [old, engine.params])


def test_a_closed_engine_takes_none() -> None:
    engine = make_engine()
    engine.close()
    for call in (lambda: engine.update_params(OLD[TINY]), engine.sleep, engine.wake):
        with pytest.raises(RuntimeError, match="the engine is closed; make a new one"):
            call()
