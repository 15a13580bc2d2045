"""The same comparison with transformers live: random shapes, and that the committed twins are what it gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_twins import LINEAR, LLAMA3, VARIANTS, all_logits, build_model, draw_token_ids, rope
from paging import chunked_logits, decoded_logits, shuffled_pages
from twins import TWIN_NAMES, decode_step, load_params, load_twin, prefill_step

from radix_jax.functional import init_kv

pytestmark = [
    pytest.mark.slow,
    # Of torch and transformers, which are not ours to mend.
    pytest.mark.filterwarnings("default"),
]
TOLERANCE = 1e-4
NUM_TOKENS = 120


def random_fields(seed: int) -> dict[str, Any]:
    """LlamaConfig fields of a small random shape."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.choice([1, 2, 3]))
    heads = kv_heads * int(rng.choice([1, 2, 4]))
    # transformers wants a multiple of the heads, though head_dim is its own.
    hidden_size = heads * int(rng.integers(3, 13))
    return {
        "vocab_size": int(rng.integers(200, 500)),
        "hidden_size": hidden_size,
        "intermediate_size": int(rng.integers(16, 100)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": int(rng.choice([8, 12, 16, 32])),
        "max_position_embeddings": 256,
        # As sharp in wide models as in narrow ones: beyond that, rounding itself moves logits by more than 1e-4.
        "initializer_range": 1.1 * hidden_size**-0.5,
        "rms_norm_eps": float(rng.choice([1e-3, 1e-5, 1e-6])),
        "tie_word_embeddings": bool(rng.integers(2)),
        **[rope("default", theta=float(rng.choice([500.0, 10000.0, 5e5]))), LLAMA3, LINEAR][seed % 3],
    }


@pytest.mark.parametrize("seed", range(18))
def test_random_shapes(seed: int, tmp_path: Path) -> None:
    page_size = (1, 4, 16)[seed // 3 % 3]
    fields = random_fields(seed)
    model = build_model(fields, seed)
    token_ids = draw_token_ids(seed, NUM_TOKENS, fields["vocab_size"])
    expected = all_logits(model, token_ids)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    _, params = load_params(tmp_path)
    num_pages = -(-NUM_TOKENS // page_size) + 5
    pages = shuffled_pages(NUM_TOKENS, page_size, num_pages, seed)
    kv = init_kv(params.config, num_pages, page_size)
    chunked = chunked_logits(prefill_step(params), kv, token_ids, pages)
    np.testing.assert_allclose(chunked, expected, rtol=0, atol=TOLERANCE)
    decoded = decoded_logits(decode_step(params), kv, token_ids, pages)
    np.testing.assert_allclose(decoded, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", TWIN_NAMES)
def test_committed_twins_are_what_transformers_gives(name: str) -> None:
    variant, twin = VARIANTS[name], load_twin(name)
    model = build_model(variant.fields, variant.seed, variant.stored_as)
    np.testing.assert_array_equal(twin.token_ids, draw_token_ids(variant.seed, len(twin.token_ids), 256))
    np.testing.assert_allclose(all_logits(model, twin.token_ids), twin.logits, rtol=0, atol=TOLERANCE)


def test_every_variant_is_committed() -> None:
    assert sorted(VARIANTS) == TWIN_NAMES
