"""Random weights of a shape: placed where the model looks for them, spread as promised, the same every time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.random_weights import random_params
from radix_jax import Engine
from radix_jax.arrays import StepInputs
from radix_jax.functional import init_kv, prefill
from radix_jax.models.llama import LlamaConfig

TIED = LlamaConfig(
    vocab_size=600,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
)
UNTIED = LlamaConfig(
    vocab_size=600, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16
)


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_logits_spread_by_about_one(config: LlamaConfig) -> None:
    params = random_params(config, "float32")
    num_tokens = 16
    inputs = StepInputs(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        positions=np.arange(num_tokens, dtype=np.int32),
        page_table=np.array([[1]], np.int32),
        kv_lens=np.array([num_tokens], np.int32),
        cu_q_lens=np.array([0, num_tokens], np.int32),
        write_slots=16 + np.arange(num_tokens, dtype=np.int32),
    )
    _, logits = jax.jit(prefill)(params, init_kv(config, 2, 16), inputs)
    assert 0.5 < float(logits.std()) < 2.0


def test_a_leaf_is_spread_by_what_it_sums_over_and_has_no_pattern() -> None:
    weights = random_params(UNTIED, "float32").weights
    embed, down = np.asarray(weights["embed"]), np.asarray(weights["layers"][0]["down_proj"])
    assert embed.std() == pytest.approx(64**-0.5, rel=0.02)
    assert down.std() == pytest.approx(96**-0.5, rel=0.05)
    assert abs(embed).max() <= (3 / 64) ** 0.5
    assert len(np.unique(embed)) > 0.99 * embed.size
    for axis in (0, 1):
        neighbours = np.corrcoef(embed.ravel(), np.roll(embed, 1, axis).ravel())[0, 1]
        assert abs(neighbours) < 0.03


def test_every_leaf_and_seed_differ_and_a_seed_repeats() -> None:
    first, again, other = (random_params(TIED, "bfloat16", seed).weights for seed in (0, 0, 1))
    q_proj, k_proj = (first["layers"][i]["q_proj"] for i in (0, 1))
    assert q_proj.dtype == jnp.bfloat16
    assert not (q_proj == k_proj).all()
    assert (q_proj == again["layers"][0]["q_proj"]).all()
    assert not (q_proj == other["layers"][0]["q_proj"]).all()


def test_an_engine_takes_them_without_a_copy() -> None:
    params = random_params(UNTIED, "float32")
    engine = Engine(UNTIED, params)
    for given, held in zip(jax.tree.leaves(params), jax.tree.leaves(engine.params), strict=True):
        assert given.unsafe_buffer_pointer() == held.unsafe_buffer_pointer()
