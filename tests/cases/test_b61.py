"""Padding rows and never-written slots that hold NaN and infinities reach no real row."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import SMALL, VOCAB_SIZE, dense_greedy, finish, greedy, tiny_llama

from radix_jax import Engine, EngineConfig, SamplingParams

# The smallest pages that each can do.
PAGE_SIZES = {"xla": 4, "pallas_interpret": 4, "pallas_tpu_interpret": 8}


@pytest.fixture(params=["xla", "pallas_interpret", pytest.param("pallas_tpu_interpret", marks=pytest.mark.slow)])
def poisoned_engine(request: pytest.FixtureRequest) -> Engine:
    """A fresh engine on a backend; in its pool every slot of every page, the null page included, is NaN or infinite."""
    options = SMALL | {"page_size": PAGE_SIZES[request.param]}
    engine = Engine(tiny_llama(), None, EngineConfig(**options, attention_backend=request.param))
    shape = engine.runner.kv.shape
    poison = np.random.default_rng(0).choice([np.nan, np.inf, -np.inf], shape).astype(np.float32)
    engine.runner._kv = jnp.asarray(poison, device=engine.runner.kv.sharding)
    return engine


def test_three_rows_in_a_bucket_of_eight(poisoned_engine: Engine) -> None:
    engine = poisoned_engine
    prompts = [[5], list(range(30)), list(range(100, 190))]
    request_ids = [engine.add_request(prompt, greedy(6)) for prompt in prompts]
    outputs = finish(engine)
    assert {record.bucket.num_rows for record in engine.ledger.records} == {8}
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        assert outputs[request_id].outputs[0].token_ids == dense_greedy(prompt, 6)
    # Drawn ids stay in range as well, and what was written is finite: the null page still is poison.
    request_id = engine.add_request(prompts[1], SamplingParams(seed=3, max_tokens=20, top_p=0.9))
    assert all(0 <= token_id < VOCAB_SIZE for token_id in finish(engine)[request_id].outputs[0].token_ids)
    kv = np.asarray(engine.runner.kv).reshape(2, SMALL["num_pages"], engine.config.page_size, -1)
    assert not np.isfinite(kv[:, 0]).any()
    for prompt in prompts:
        match = engine.cache.match_prefix(np.asarray(prompt, np.int32), None)
        assert match.cached_len == len(prompt) // engine.config.page_size * engine.config.page_size
        assert np.isfinite(kv[:, match.pages]).all()
