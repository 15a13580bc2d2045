"""Llama: its config, the leaves of its module, and what its dense call computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import TINY, VOCAB_SIZE, tiny_llama

from radix_jax.models.llama import Llama, LlamaConfig, parse_config, weight_specs

SIZES: dict[str, int] = {
    "vocab_size": 32,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
}
HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 is below its least value 1"):
        LlamaConfig(**(SIZES | {name: 0}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 5}, "head_dim=5 is odd; rope rotates pairs"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
    ],
)
def test_sizes_that_can_not_be(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**(SIZES | changes))


@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_module_has_the_leaves_that_checkpoints_fill(tied: bool) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    state = nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    leaves = {
        tuple(part.key for part in path): leaf.shape
        for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))[0]
    }
    expected = {
        spec.path: spec.shape[::-1] if spec.transpose else spec.shape
        for spec in weight_specs(config)
        if not (tied and spec.path == ("head",))
    }
    assert leaves == expected


def test_a_fresh_module_is_random_by_its_rngs() -> None:
    config = LlamaConfig(**SIZES)
    ids = jnp.arange(5, dtype=jnp.int32)
    run = jax.jit(lambda key: Llama(config, rngs=nnx.Rngs(key))(ids))
    once, again, other = (run(jax.random.key(seed)) for seed in (0, 0, 1))
    assert once.shape == (5, 32)
    np.testing.assert_array_equal(once, again)
    assert np.abs(once - other).max() > 0.1


def test_no_token_sees_what_comes_after_it() -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, 24).astype(np.int32)
    changed = ids.copy()
    changed[10] += 1
    module = tiny_llama()
    run = jax.jit(lambda x: module(x))
    logits, after = np.asarray(run(ids)), np.asarray(run(changed))
    np.testing.assert_array_equal(logits[:10], after[:10])
    assert (np.abs(logits[10:] - after[10:]).max(axis=1) > 1e-3).all()


def test_gradients_reach_every_leaf() -> None:
    """The module is there for training too."""
    ids = jnp.arange(12, dtype=jnp.int32)

    def loss(module: Llama) -> jax.Array:
        return -jax.nn.log_softmax(module(ids[:-1]))[jnp.arange(11), ids[1:]].mean()

    gradients = nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(tiny_llama()))
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path


def test_config_json_fills_what_it_leaves_out() -> None:
    assert parse_config(HF_CONFIG) == LlamaConfig(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=20,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
    )


@pytest.mark.parametrize("name", [name for name in HF_CONFIG if name != "architectures"])
def test_a_missing_key_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"lacks '{name}'"):
        parse_config({key: value for key, value in HF_CONFIG.items() if key != name})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_features_that_llama_has_not_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(HF_CONFIG | keys)


def test_specs_name_every_tensor_once() -> None:
    specs = weight_specs(TINY)
    for names in zip(*((spec.path, spec.hf_name, spec.gguf_name) for spec in specs), strict=True):
        assert len(set(names)) == len(specs) == 3 + 9 * TINY.num_layers
