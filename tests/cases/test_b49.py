"""Tied embeddings: the head is the embedding transposed, whether or not the checkpoint holds a head as well."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, dense_logits, generate, greedy, module_of, random_weights, tiny_engine

from radix_jax.models.llama import LlamaConfig, weight_specs
from radix_jax.models.registry import make_params

TIED: LlamaConfig = dataclasses.replace(TINY, tie_word_embeddings=True)


@pytest.mark.parametrize("present", [False, True], ids=["head_absent", "head_present"])
def test_logits_are_those_of_the_embedding(present: bool) -> None:
    weights = random_weights(TIED)
    if present:
        weights["head"] = jnp.full((TIED.hidden_size, TIED.vocab_size), jnp.nan)
    params = make_params(TIED, weights)
    assert params.head is not None
    assert "head" not in params.weights
    np.testing.assert_array_equal(params.head, weights["embed"].T)


def test_the_engine_and_the_dense_module_agree() -> None:
    module = module_of(TIED, random_weights(TIED))
    prompt = np.arange(10, 30, dtype=np.int32)
    [output] = generate(tiny_engine(module), [prompt], greedy(1))
    padded = np.zeros(TIED.max_position_embeddings, np.int32)
    padded[: len(prompt)] = prompt
    logits = np.asarray(dense_logits(module)(jnp.asarray(padded)))[len(prompt) - 1]
    assert output.outputs[0].token_ids == [logits.argmax()]


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_may_leave_out_the_head_of_a_tied_model_only(tied: bool) -> None:
    [head] = [
        spec for spec in weight_specs(dataclasses.replace(TINY, tie_word_embeddings=tied)) if spec.path == ("head",)
    ]
    assert head.optional is tied
    assert (head.hf_name, head.gguf_name) == ("lm_head.weight", "output.weight")
    weights = random_weights(dataclasses.replace(TINY, tie_word_embeddings=True))
    if tied:
        make_params(TIED, weights)
    else:
        with pytest.raises(ValueError, match="lack the leaf head"):
            make_params(TINY, weights)
