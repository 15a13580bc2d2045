"""Which family a model belongs to, and a user's own leaves as the engine's params."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import TINY, module_of, random_weights, tiny_llama

from radix_jax.models import registry
from radix_jax.models.base import ModelFamily, ModelParams
from radix_jax.models.llama import LLAMA, Llama, LlamaConfig
from radix_jax.models.registry import (
    config_of,
    family_for_config,
    family_for_hf_config,
    make_params,
    params_of,
    register_family,
)

TIED = dataclasses.replace(TINY, tie_word_embeddings=True)


@dataclasses.dataclass(frozen=True)
class OtherConfig:
    vocab_size: int = 8
    tie_word_embeddings: bool = False


class OtherModule(nnx.Module):
    def __init__(self) -> None:
        self.config = OtherConfig()


def leaves_of(tree: Any) -> list[jax.Array]:
    return jax.tree.leaves(tree)


def test_llama_is_known() -> None:
    assert family_for_hf_config({"architectures": ["LlamaForCausalLM"]}) is LLAMA
    assert family_for_config(TINY) is LLAMA
    assert config_of(tiny_llama()) is TINY
    assert config_of(TINY) is TINY


@pytest.mark.parametrize("hf_config", [{"architectures": ["GPT2LMHeadModel"]}, {"architectures": []}, {}])
def test_an_unknown_architecture_is_named_with_the_known_ones(hf_config: dict[str, Any]) -> None:
    named = (hf_config.get("architectures") or ["(none named)"])[0].replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=f"architecture {named} is not built; built are LlamaForCausalLM"):
        family_for_hf_config(hf_config)


@pytest.mark.parametrize("model", [OtherConfig(), OtherModule(), "llama", None])
def test_what_is_of_no_family_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="is not the config of a registered family"):
        params_of(model, {})


def test_a_family_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", list(registry._FAMILIES))
    own = dataclasses.replace(LLAMA, name="other", architectures=("OtherLM",), config_type=OtherConfig)
    register_family(own)
    assert family_for_config(OtherConfig()) is own
    assert family_for_hf_config({"architectures": ["OtherLM"]}) is own
    assert family_for_config(TINY) is LLAMA


@pytest.mark.parametrize(
    "changes", [{"architectures": ("OtherLM",)}, {"config_type": OtherConfig, "architectures": ("LlamaForCausalLM",)}]
)
def test_no_two_families_answer_to_one_name(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(registry._FAMILIES)
    monkeypatch.setattr(registry, "_FAMILIES", list(before))
    with pytest.raises(ValueError, match="'other' has the config type or an architecture of 'llama'"):
        register_family(dataclasses.replace(LLAMA, name="other", **changes))
    assert before == registry._FAMILIES


def test_every_form_of_params_is_taken_without_a_copy() -> None:
    weights = random_weights(TINY)
    module = module_of(TINY, weights)
    forms = [
        params_of(module),
        params_of(module, nnx.state(module, nnx.Param)),
        params_of(module, weights),
        params_of(TINY, weights),
        params_of(TINY, make_params(TINY, weights)),
    ]
    for params in forms:
        assert isinstance(params, ModelParams)
        assert params.config == TINY
        assert params.head is params.weights["head"]
        assert jax.tree.all(jax.tree.map(lambda ours, theirs: ours is theirs, params.weights, weights))


def test_a_tied_head_is_the_only_derived_leaf() -> None:
    weights = random_weights(TIED)
    params = params_of(TIED, weights)
    assert params.weights["embed"] is weights["embed"]
    assert "head" not in params.weights
    assert params.head is not None
    np.testing.assert_array_equal(params.head, weights["embed"].T)


def test_a_config_alone_has_no_weights() -> None:
    with pytest.raises(TypeError, match="a LlamaConfig holds no weights; give params="):
        params_of(TINY)


def test_params_of_another_config_are_refused() -> None:
    with pytest.raises(ValueError, match="another config"):
        params_of(TIED, make_params(TINY, random_weights(TINY)))


def without(weights: dict[Any, Any], *path: Any) -> dict[Any, Any]:
    """`weights` with one leaf less."""
    copy = jax.tree.map(lambda leaf: leaf, weights)
    inner = copy
    for part in path[:-1]:
        inner = inner[part]
    del inner[path[-1]]
    return copy


def test_a_missing_leaf_is_named() -> None:
    weights = random_weights(TINY)
    with pytest.raises(ValueError, match=r"lack the leaf layers\.1\.k_proj of shape \(64, 32\)"):
        params_of(TINY, without(weights, "layers", 1, "k_proj"))
    with pytest.raises(ValueError, match=r"lack the leaf head of shape \(64, 512\)"):
        params_of(TINY, without(weights, "head"))


def test_an_extra_leaf_is_named() -> None:
    weights = random_weights(TINY)
    weights["layers"][1]["q_bias"] = jnp.zeros(64)
    with pytest.raises(ValueError, match=r"leaves that the model has not: layers\.1\.q_bias"):
        params_of(TINY, weights)


def test_a_wrong_shape_is_named() -> None:
    weights = random_weights(TINY)
    weights["layers"][0]["down_proj"] = weights["layers"][0]["down_proj"].T
    with pytest.raises(ValueError, match=r"layers\.0\.down_proj has shape \(64, 96\), the model needs \(96, 64\)"):
        params_of(TINY, weights)


@pytest.mark.parametrize("leaf", [1.0, jnp.ones(64, jnp.int32)])
def test_a_leaf_that_holds_no_floats_is_named(leaf: Any) -> None:
    weights = random_weights(TINY)
    weights["layers"][1]["attn_norm"] = leaf
    with pytest.raises(ValueError, match=r"leaf layers\.1\.attn_norm is a .*, not an array of floats"):
        params_of(TINY, weights)


def test_params_are_a_pytree_with_the_config_as_structure() -> None:
    params = params_of(tiny_llama())
    leaves, structure = jax.tree.flatten(params)
    # The head is in the weights and beside them, as one array.
    assert len(leaves) == len(leaves_of(params.weights)) + 1
    assert jax.tree.unflatten(structure, leaves).config is params.config
    shapes = jax.tree.map(lambda leaf: leaf.shape, params, is_leaf=lambda x: isinstance(x, jax.Array))
    assert shapes.head == (64, 512)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    assert ".weights['layers'][1]['q_proj']" in names
    assert ".head" in names


def test_a_module_made_by_its_user_runs() -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8
    )
    module = Llama(config, rngs=nnx.Rngs(3))
    params = params_of(module)
    assert params.weights["layers"][0]["q_proj"] is module.layers[0].q_proj.get_value()


def test_a_family_that_reads_no_checkpoints_has_its_leaves_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", list(registry._FAMILIES))
    own = ModelFamily(name="own", config_type=OtherConfig, forward=LLAMA.forward)
    register_family(own)
    config, head = OtherConfig(), jnp.ones((2, 8))
    assert make_params(config, {"head": head, "anything": jnp.ones(3)}).head is head
    with pytest.raises(ValueError, match="params hold no array 'head' at their top"):
        make_params(config, {"anything": jnp.ones(3)})
    with pytest.raises(ValueError, match="params hold no array 'embed' at their top"):
        make_params(OtherConfig(tie_word_embeddings=True), {"embed": {"embedding": head}})
    for reads in (own.parse_config, own.weight_specs):
        with pytest.raises(ValueError, match="no parse_config and weight_specs, so it reads no checkpoints"):
            reads({})
