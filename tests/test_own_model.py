"""A model of one's own: engine and LLM use its leaves where they lie; a tied head is the one derived leaf."""

import dataclasses
from typing import Any

import jax
import pytest
from flax import nnx
from tiny import SMALL, TINY, dense_greedy, finish, greedy, module_of, random_weights

from radix_jax import LLM, Engine, EngineConfig
from radix_jax.models.base import ModelParams
from radix_jax.models.llama import Llama

CONFIGS = {"own_head": TINY, "tied": dataclasses.replace(TINY, tie_word_embeddings=True)}
FORMS = {
    "module": lambda module, state: (module, None),
    "module_and_state": lambda module, state: (module, state),
    "config_and_state": lambda module, state: (module.config, state),
    "config_and_dict": lambda module, state: (module.config, nnx.to_pure_dict(state)),
}


def addresses(tree: Any) -> set[int]:
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


def check_memory(params: ModelParams, module: Llama) -> None:
    """Every leaf lies where the module has it, and nothing is there beside them but the head of a tied model."""
    own = addresses(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    assert addresses(params.weights) == own
    assert (addresses(params) == own) is not module.config.tie_word_embeddings
    assert len(addresses(params) - own) <= 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_params_are_not_copied(name: str, form: str) -> None:
    module = module_of(CONFIGS[name], random_weights(CONFIGS[name]))
    model, params = FORMS[form](module, nnx.state(module, nnx.Param))
    engine = Engine(model, params, EngineConfig(**SMALL))
    check_memory(engine.params, module)
    engine.close()
    with LLM(model, params=params, **SMALL) as llm:
        check_memory(llm.engine.params, module)


def test_closing_leaves_the_users_model_whole() -> None:
    module = module_of(TINY, random_weights(TINY))
    engine = Engine(module, None, EngineConfig(**SMALL))
    request_id = engine.add_request([1, 2, 3], greedy(2))
    expected = dense_greedy([1, 2, 3], 2, module)
    assert finish(engine)[request_id].outputs[0].token_ids == expected
    engine.close()
    assert dense_greedy([1, 2, 3], 2, module) == expected


def test_a_second_engine_shares_the_memory_of_the_first() -> None:
    module = module_of(TINY, random_weights(TINY))
    first = Engine(module, None, EngineConfig(**SMALL))
    second = Engine(first.params.config, first.params, EngineConfig(**SMALL))
    assert addresses(second.params) == addresses(first.params)
    first.close()
    second.close()
