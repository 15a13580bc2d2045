"""Our logits against those of transformers, in float32, through the paged, chunked, cached path."""

import jax
import numpy as np
import pytest
from paging import chunked_logits, decoded_logits, shuffled_pages
from twins import TWIN_NAMES, Twin, decode_step, load_twin, prefill_step

from radix_jax.functional import init_kv
from radix_jax.models.layers import parse_rope

TOLERANCE = 1e-4
CASES = [(name, 4) for name in TWIN_NAMES] + [("gqa", 1), ("gqa", 16), ("rope_llama3", 1), ("rope_llama3", 16)]


def pool(twin: Twin, page_size: int) -> tuple[jax.Array, np.ndarray]:
    """(kv, pages): a pool a little larger than the sequence, and the sequence's pages in it."""
    num_tokens = len(twin.token_ids)
    num_pages = -(-num_tokens // page_size) + 3
    return init_kv(twin.params.config, num_pages, page_size), shuffled_pages(num_tokens, page_size, num_pages)


@pytest.mark.parametrize(("name", "page_size"), CASES)
def test_chunked_prefill(name: str, page_size: int) -> None:
    twin = load_twin(name)
    kv, pages = pool(twin, page_size)
    logits = chunked_logits(prefill_step(twin.params), kv, twin.token_ids, pages)
    np.testing.assert_allclose(logits, twin.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "page_size"), CASES)
def test_decode(name: str, page_size: int) -> None:
    twin = load_twin(name)
    kv, pages = pool(twin, page_size)
    logits = decoded_logits(decode_step(twin.params), kv, twin.token_ids, pages)
    np.testing.assert_allclose(logits, twin.logits, rtol=0, atol=TOLERANCE)


def test_twins_cover_the_forms() -> None:
    configs = {name: load_twin(name).params.config for name in TWIN_NAMES}
    groups = {(config.num_heads, config.num_kv_heads) for config in configs.values()}
    assert {(4, 4), (4, 1), (4, 2)} <= groups
    assert {config.tie_word_embeddings for config in configs.values()} == {True, False}
    assert {config.rope.kind for config in configs.values()} == {"default", "linear", "llama3"}
    assert any(config.head_dim * config.num_heads != config.hidden_size for config in configs.values())


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("name", ["rope_llama3", "rope_linear"])
def test_older_spellings_of_rope_mean_the_same(name: str, type_key: str) -> None:
    twin = load_twin(name)
    older = dict(twin.hf_config)
    scaling = dict(older.pop("rope_parameters"))
    older["rope_theta"] = scaling.pop("rope_theta")
    scaling[type_key] = scaling.pop("rope_type")
    older["rope_scaling"] = scaling
    assert parse_rope(older) == twin.params.config.rope
