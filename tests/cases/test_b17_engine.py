"""A prompt that the context holds and the pool does not is refused at once, and the next one is served."""

import dataclasses

import pytest
from tiny import TINY, finish, greedy, module_of, random_weights

from radix_jax import Engine, EngineConfig


def test_refused_with_numbers_and_the_next_one_is_served() -> None:
    config = dataclasses.replace(TINY, max_position_embeddings=4096)
    engine = Engine(
        module_of(config, random_weights(config)),
        None,
        EngineConfig(page_size=16, num_pages=49, max_model_len=4096, max_running_requests=8, max_prefill_tokens=64),
    )
    with pytest.raises(
        ValueError, match=r"request of 1002 prompt \+ 1 output tokens needs 63 pages of 16 tokens, the "
    ):
        engine.add_request([7] * 1002, greedy(1))
    assert not engine.has_unfinished()
    request_id = engine.add_request([1, 2, 3, 4, 5], greedy(1))
    assert finish(engine)[request_id].outputs[0].finish_reason == "length"
    # 48 pages are 768 tokens, and the last output token needs no slot.
    engine.abort(engine.add_request([7] * 768, greedy(1)))
    with pytest.raises(ValueError, match="needs 49 pages of 16 tokens, the pool has 48; raise num_pages or shorten it"):
        engine.add_request([7] * 769, greedy(1))
