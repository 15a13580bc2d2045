"""head_dim is the config's own, not hidden_size / num_attention_heads."""

import numpy as np
from paging import chunked_logits, shuffled_pages
from twins import TWINS, load_twin, prefill_step

from radix_jax.checkpoints import open_checkpoint
from radix_jax.functional import init_kv, kv_width
from radix_jax.models.llama import LlamaConfig, parse_config, weight_specs

TWIN = "head_dim"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 32


def test_the_twin_is_the_case() -> None:
    config = load_twin(TWIN).params.config
    sizes = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
    assert sizes == (HIDDEN, HEADS, KV_HEADS, HEAD_DIM)


def test_projections_take_their_shape_from_head_dim() -> None:
    config = load_twin(TWIN).params.config
    stored = {spec.path[-1]: spec.shape for spec in weight_specs(config) if spec.path[:2] == ("layers", 0)}
    assert stored["q_proj"] == (128, 64)
    assert stored["k_proj"] == (64, 64)
    assert stored["v_proj"] == (64, 64)
    assert stored["o_proj"] == (64, 128)
    with open_checkpoint(TWINS / TWIN) as checkpoint:
        assert checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)
        assert checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"].shape == (64, 128)


def test_pool_is_as_wide_as_the_heads() -> None:
    config = load_twin(TWIN).params.config
    assert kv_width(config) == 128
    assert init_kv(config, num_pages=5, page_size=4).shape == (2 * 5, 4, 128)


def test_logits_equal_those_of_the_reference() -> None:
    twin = load_twin(TWIN)
    kv = init_kv(twin.params.config, num_pages=30, page_size=4)
    pages = shuffled_pages(len(twin.token_ids), 4, 30)
    logits = chunked_logits(prefill_step(twin.params), kv, twin.token_ids, pages)
    np.testing.assert_allclose(logits, twin.logits, rtol=0, atol=1e-4)


def test_without_head_dim_it_is_the_quotient() -> None:
    hf_config = {
        "vocab_size": 256,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    assert parse_config(hf_config).head_dim == 16
    assert parse_config(hf_config | {"head_dim": None}).head_dim == 16
    assert parse_config(hf_config | {"head_dim": HEAD_DIM}) == LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
    )
