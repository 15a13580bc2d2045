"""Pins of an engine: kept until nothing else is left, within a budget, for a time."""

import re

import numpy as np
import pytest
from tiny import SMALL, finish, generate, greedy, random_prompts, share_programs, tiny_llama

from radix_jax import Engine, EngineConfig
from radix_jax.cache import HandleError

NUM_PAGES = 65  # of 4 tokens: 256 tokens, half of which may be pinned
PROMPTS = random_prompts(8, lens=(80, 81), seed=90)


def new_engine(**fields: object) -> Engine:
    config = EngineConfig(**(SMALL | {"num_pages": NUM_PAGES, "partial_pages": False} | fields))
    return share_programs(Engine(tiny_llama(), None, config))


def hit_len(engine: Engine, prompt: np.ndarray) -> int:
    [output] = generate(engine, [prompt], greedy(1))
    return output.cached_tokens


def test_what_is_pinned_outlives_what_is_not() -> None:
    engine = new_engine()
    generate(engine, PROMPTS[:2], greedy(1))
    pin = engine.pin(PROMPTS[0])
    assert pin.cached_len == engine.stats().num_pinned_tokens == 80
    for prompt in PROMPTS[2:]:
        hit_len(engine, prompt)
    assert (hit_len(engine, PROMPTS[0]), hit_len(engine, PROMPTS[1])) == (76, 0)
    engine.check_integrity()
    engine.unpin(pin)
    assert engine.stats().num_pinned_tokens == 0
    for prompt in PROMPTS[2:]:
        hit_len(engine, prompt)
    assert hit_len(engine, PROMPTS[0]) == 0
    with pytest.raises(HandleError, match="taken off once"):
        engine.unpin(pin)


def test_pins_never_keep_a_request_out() -> None:
    engine = new_engine(max_pinned_tokens=10_000)
    for prompt in PROMPTS[:3]:
        hit_len(engine, prompt)
        engine.pin(prompt)
    assert engine.stats().num_pinned_tokens == 240
    [output] = generate(engine, [PROMPTS[3]], greedy(40))
    assert len(output.outputs[0].token_ids) == 40
    assert engine.stats().num_pinned_tokens < 240
    engine.check_integrity()


def test_the_budget_counts_what_pins_share_once_and_is_refused_with_the_numbers() -> None:
    engine = new_engine()
    assert engine.config.max_pinned_tokens == 128
    generate(engine, PROMPTS[:2], greedy(1))
    pins = [engine.pin(PROMPTS[0][:length]) for length in (40, 60, 63)]
    assert [pin.cached_len for pin in pins] == [40, 60, 60]
    assert engine.stats().num_pinned_tokens == 60
    message = "pinning 80 more tokens on top of 60 exceeds max_pinned_tokens=128; unpin something, wait"
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.pin(PROMPTS[1])
    engine.unpin(pins[1])
    assert engine.stats().num_pinned_tokens == 60
    engine.unpin(pins[2])
    assert engine.stats().num_pinned_tokens == 40
    engine.pin(PROMPTS[1])
    assert engine.stats().num_pinned_tokens == 120
    engine.check_integrity()


def test_only_what_is_cached_in_that_namespace_is_pinned() -> None:
    engine = new_engine()
    engine.add_request(PROMPTS[0], greedy(1), namespace="a")
    finish(engine)
    assert engine.pin(PROMPTS[0]).cached_len == 0
    assert engine.pin([*PROMPTS[0][:10].tolist(), 1], namespace="a").cached_len == 8
    assert engine.stats().num_pinned_tokens == 8


def test_a_pin_ends_by_itself() -> None:
    engine = new_engine()
    generate(engine, PROMPTS[:1], greedy(1))
    tree = engine.cache.tree
    kept = engine.pin(PROMPTS[0][:20], ttl_s=1e6)
    # So short that no clock tells its end from its beginning.
    for has_ended in (engine.stats, engine.step, lambda: engine.pin(PROMPTS[0][:4])):
        pin = engine.pin(PROMPTS[0], ttl_s=1e-12)
        assert (pin.cached_len, tree.pinned_size) == (80, 80)
        has_ended()
        assert tree.pinned_size == 20
        with pytest.raises(HandleError, match="over"):
            engine.unpin(pin)
    engine.unpin(kept)
    assert tree.pinned_size == 4
    engine.flush_cache()
    assert engine.stats().num_pinned_tokens == 0


def test_what_can_not_be_pinned_changes_nothing() -> None:
    engine = new_engine(max_pinned_tokens=0)
    with pytest.raises(ValueError, match="max_pinned_tokens=0"):
        engine.pin(PROMPTS[0])
    with pytest.raises(ValueError, match="max_pinned_tokens=-1 is below"):
        EngineConfig(max_pinned_tokens=-1)
    engine = new_engine()
    generate(engine, PROMPTS[:1], greedy(1))
    with pytest.raises(ValueError, match="must be above 0"):
        engine.pin(PROMPTS[0], ttl_s=0.0)
    with pytest.raises(TypeError, match="not hashable"):
        engine.pin(PROMPTS[0], namespace=([],))
    assert hit_len(engine, PROMPTS[0]) == 76


def test_new_weights_end_pins_and_give_their_budget_back() -> None:
    engine = new_engine()
    generate(engine, PROMPTS[:1], greedy(1))
    request_id = engine.add_request(PROMPTS[0], greedy(20))
    engine.step()
    pins = [engine.pin(PROMPTS[0]), engine.pin(PROMPTS[0][:40], ttl_s=1e6)]
    engine.update_params(tiny_llama(seed=1))
    assert engine.stats().num_pinned_tokens == 0
    for pin in pins:
        with pytest.raises(HandleError, match="over"):
            engine.unpin(pin)
    assert engine.pin(PROMPTS[0]).cached_len == 0, "what is cached is of the old ones"
    finish(engine)
    assert request_id not in engine.unfinished
    generate(engine, PROMPTS[:1], greedy(1))
    pin = engine.pin(PROMPTS[0])
    assert pin.cached_len == engine.stats().num_pinned_tokens == 80
    for prompt in PROMPTS[2:]:
        hit_len(engine, prompt)
    assert hit_len(engine, PROMPTS[0]) == 76
    engine.unpin(pin)
    engine.check_integrity()


def test_an_engine_without_a_pool_pins_nothing() -> None:
    engine = new_engine()
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.pin(PROMPTS[0])
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.pin(PROMPTS[0])
