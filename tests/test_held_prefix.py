"""Held prefixes: what they compute, what they keep, and what they say where that goes wrong."""

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny import (
    SMALL,
    VOCAB_SIZE,
    assert_idle,
    dense_greedy,
    finish,
    generate,
    greedy,
    random_prompts,
    share_programs,
    tiny_engine,
    tiny_llama,
)

from radix_jax import Engine, EngineConfig
from radix_jax.cache import HandleError, OutOfPages

PROMPT, MORE, OTHER = random_prompts(3, lens=(23, 24), seed=11)
MORE = MORE[:5]


def new_engine(**fields: Any) -> Engine:
    return share_programs(Engine(tiny_llama(), None, EngineConfig(**(SMALL | fields))))


def num_computed(engine: Engine, call: Callable[[], Any]) -> tuple[int, Any]:
    """(prompt tokens that a call computes, what it returns)."""
    before = engine.stats().num_prefill_tokens
    result = call()
    engine.check_integrity()
    return engine.stats().num_prefill_tokens - before, result


@pytest.mark.parametrize("page_size", [1, 4])
def test_each_token_is_computed_once_and_the_last_one_a_sample(page_size: int) -> None:
    engine = tiny_engine(page_size=page_size)
    num, handle = num_computed(engine, lambda: engine.prefix(PROMPT))
    assert (num, handle.cached_len) == (22, 22)
    assert handle.token_ids.tolist() == PROMPT.tolist()
    num, longer = num_computed(engine, lambda: handle.extend(MORE.tolist()))
    assert (num, longer.cached_len) == (5, 27)
    assert num_computed(engine, lambda: engine.prefix(PROMPT).release())[0] == 0
    num, [output] = num_computed(engine, lambda: handle.sample(greedy(4)))
    assert (num, output.token_ids, output.text) == (1, dense_greedy(PROMPT, 4), "")
    num, outputs = num_computed(engine, lambda: longer.sample(greedy(2, n=3, logprobs=0)))
    assert num == 3
    assert [output.token_ids for output in outputs] == [dense_greedy([*PROMPT, *MORE], 2)] * 3
    assert all(output.cumulative_logprob < 0 for output in outputs)
    handle.release()
    longer.release()
    assert_idle(engine)


def test_what_a_sample_computed_is_not_computed_to_extend_by_it() -> None:
    engine = tiny_engine()
    with engine.prefix(PROMPT) as handle:
        [output] = handle.sample(greedy(3))
        num, longer = num_computed(engine, lambda: handle.extend(output.token_ids))
        assert (num, longer.cached_len) == (0, 25)
        longer.release()


def test_whole_pages_alone_without_partial_pages() -> None:
    engine = tiny_engine(partial_pages=False)
    with engine.prefix(PROMPT) as handle:
        assert handle.cached_len == 20
        num, [output] = num_computed(engine, lambda: handle.sample(greedy(2)))
        assert (num, output.token_ids) == (3, dense_greedy(PROMPT, 2))


def test_nothing_is_computed_or_held_of_one_token() -> None:
    engine = tiny_engine()
    num, handle = num_computed(engine, lambda: engine.prefix([7]))
    assert (num, handle.cached_len) == (0, 0)
    with handle:
        assert handle.sample(greedy(2))[0].token_ids == dense_greedy([7], 2)
    assert_idle(engine)


def test_of_a_long_neighbour_one_page_is_held() -> None:
    engine = tiny_engine()
    generate(engine, [np.concatenate([PROMPT[:21], OTHER])], greedy(8))
    num, handle = num_computed(engine, lambda: engine.prefix(PROMPT[:23]))
    assert (num, handle.cached_len) == (1, 22)
    with engine.prefix(PROMPT[:22]) as shorter:
        assert shorter.cached_len == 21
        assert engine.stats().num_protected_pages <= 7, "6 pages, and a tail"
    handle.release()


def test_it_is_kept_while_everything_else_is_evicted() -> None:
    engine = tiny_engine(num_pages=41)
    handle = engine.prefix(PROMPT)
    before = engine.stats().num_evicted_tokens
    generate(engine, random_prompts(4, lens=(60, 80), seed=3), greedy(2))
    assert engine.stats().num_evicted_tokens > before
    num, [output] = num_computed(engine, lambda: handle.sample(greedy(4)))
    assert (num, output.token_ids) == (1, dense_greedy(PROMPT, 4))
    handle.release()
    generate(engine, random_prompts(4, lens=(60, 80), seed=4), greedy(2))
    assert engine.cache.match_len(PROMPT) == 0
    assert_idle(engine)


def test_more_tails_than_the_cache_keeps_by_itself() -> None:
    engine = tiny_engine(num_pages=41)
    handles = [engine.prefix([first, 1, 2]) for first in range(12)]
    assert [handle.cached_len for handle in handles] == [2] * 12
    engine.check_integrity()
    for handle in handles:
        handle.release()
    assert_idle(engine)


def test_other_requests_go_on_beside_it() -> None:
    engine = tiny_engine()
    stream = engine.stream(OTHER, greedy(12))
    given = [next(stream)]
    with engine.prefix(PROMPT) as handle:
        [output] = handle.sample(greedy(6))
        given += stream
        assert output.token_ids == dense_greedy(PROMPT, 6)
    expected = dense_greedy(OTHER, 12)
    assert [state.outputs[0].token_ids for state in given] == [expected[: end + 1] for end in range(12)]


def test_forks_hold_by_themselves() -> None:
    engine = tiny_engine()
    handle = engine.prefix(PROMPT)
    forks = handle.fork(2)
    handle.release()
    forks[0].release()
    engine.check_integrity()
    assert engine.stats().num_protected_pages > 0
    assert num_computed(engine, lambda: forks[1].sample(greedy(1)))[0] == 1
    forks[1].release()
    assert handle.token_ids is forks[1].token_ids
    assert_idle(engine)


def test_a_released_handle() -> None:
    engine = tiny_engine()
    with engine.prefix(PROMPT, namespace="a") as handle:
        assert handle.namespace == "a"
        assert repr(handle) == "HeldPrefix(23 tokens, 22 held)"
        assert not handle.fork(0)
    handle.release()
    assert repr(handle) == "HeldPrefix(23 tokens, it was released)"
    for use in (handle.sample, lambda: handle.extend([1]), lambda: handle.fork(1), handle.__enter__):
        with pytest.raises(HandleError, match="it was released; make another"):
            use()
    assert_idle(engine)


def test_namespaces_do_not_share() -> None:
    engine = tiny_engine()
    with engine.prefix(PROMPT, namespace="a") as handle:
        num, other = num_computed(engine, lambda: engine.prefix(PROMPT, namespace="b"))
        assert num == 22
        other.release()
        num, longer = num_computed(engine, lambda: handle.extend(MORE))
        assert (num, longer.namespace) == (5, "a")
        longer.release()


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([], ValueError, "empty prompt"),
        ([VOCAB_SIZE], ValueError, "outside the vocabulary"),
        ([0.5], TypeError, "flat sequence of ints|Type-check error"),
        ([3, True], TypeError, "got a bool"),
        (range(128), ValueError, "exceeds max_model_len=128"),
    ],
)
def test_bad_ids_are_refused(ids: Any, error: type[Exception], message: str) -> None:
    engine = tiny_engine()
    with pytest.raises(error, match=message):
        engine.prefix(ids)
    with engine.prefix(PROMPT) as handle:
        if ids != []:
            with pytest.raises(error, match=message):
                handle.extend(ids)
        with pytest.raises(ValueError, match="nothing to extend by"):
            handle.extend([])
        with pytest.raises(ValueError, match="num_handles=-1 is negative"):
            handle.fork(-1)
        with pytest.raises(TypeError, match=r"unhashable|namespace"):
            engine.prefix(PROMPT, namespace=[])
    assert_idle(engine)


def test_an_engine_without_a_prefix_cache_holds_none() -> None:
    with pytest.raises(ValueError, match="enable_prefix_cache=False: this engine holds no prefixes"):
        tiny_engine(enable_prefix_cache=False).prefix(PROMPT)


def test_no_flush_while_something_is_held() -> None:
    engine = tiny_engine()
    with (
        engine.prefix(PROMPT),
        pytest.raises(RuntimeError, match=r"1 prefixes are held: 22 tokens held by .*test_held_prefix.py:\d+; release"),
    ):
        engine.flush_cache()
    engine.flush_cache()


def test_no_room_names_what_is_held_and_changes_nothing() -> None:
    engine = tiny_engine(num_pages=17)
    handles = [engine.prefix(prompt[:20]) for prompt in (PROMPT, OTHER)]
    before = engine.stats()
    waiting = engine.add_request(random_prompts(1, lens=(40, 41))[0], greedy(2))
    for _ in range(2):
        with pytest.raises(OutOfPages, match=r"1 requests wait, none runs, .*; 2 prefixes are held: 19 tokens held by"):
            engine.step()
        engine.check_integrity()
    with pytest.raises(OutOfPages, match="release what is not needed"):
        engine.prefix(random_prompts(1, lens=(50, 51))[0])
    assert engine.unfinished == {waiting}
    assert engine.stats().num_prefill_tokens == before.num_prefill_tokens
    assert handles[0].sample(greedy(1))[0].token_ids == dense_greedy(PROMPT[:20], 1)
    for handle in handles:
        handle.release()
    assert len(finish(engine)[waiting].outputs[0].token_ids) == 2
    assert_idle(engine)


def test_whose_time_is_over_is_told_of_before_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(num_pages=17, queue_timeout_s=5.0)
    now = [0.0]
    monkeypatch.setattr("radix_jax.engine.time.monotonic", lambda: now[0])
    handles = [engine.prefix(prompt[:20]) for prompt in (PROMPT, OTHER)]
    [long] = random_prompts(1, lens=(40, 41))
    late = engine.add_request(long, greedy(2))
    now[0] = 4.0
    engine.add_request(long, greedy(2))
    now[0] = 6.0
    [output] = engine.step()
    assert (output.request_id, output.outputs[0].finish_reason) == (late, "abort")
    with pytest.raises(OutOfPages, match="1 requests wait"):
        engine.step()
    now[0] = 12.0
    assert len(engine.step()) == 1
    for handle in handles:
        handle.release()
    engine.close()


def test_a_prefix_whose_time_is_over() -> None:
    engine = new_engine(queue_timeout_s=1e-9)
    with pytest.raises(RuntimeError, match="computing the prefix was ended: queue_timeout_s"):
        engine.prefix(PROMPT)
    assert_idle(engine)
    engine.close()


def test_a_step_that_failed_ends_the_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    handle = engine.prefix(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "read", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            handle.sample(greedy(2))
    with pytest.raises(HandleError, match="a step failed, which emptied the cache; make another"):
        handle.sample(greedy(2))
    handle.release()
    engine.check_integrity()
    with engine.prefix(PROMPT) as again:
        assert again.sample(greedy(2))[0].token_ids == dense_greedy(PROMPT, 2)
    assert_idle(engine)
    engine.close()


def test_closing_names_what_is_still_held() -> None:
    engine = new_engine()
    handles = [engine.prefix([first, 1, 2]) for first in range(10)]
    with pytest.warns(ResourceWarning, match=r"closed while 10 prefixes are held: 2 tokens .* and 2 more$") as told:
        engine.close()
    assert len(told) == 1
    with pytest.raises(HandleError, match="the engine was closed"):
        handles[0].fork(1)
    handles[0].release()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.prefix(PROMPT)


def test_a_handle_that_is_dropped_is_named_and_given_back() -> None:
    engine = tiny_engine()
    handle = engine.prefix(PROMPT)
    with pytest.warns(ResourceWarning, match=re.escape(f"22 tokens held by {__file__}:")):
        del handle
    engine.check_integrity()
    assert_idle(engine)


def test_random_use_keeps_every_page_accounted_for() -> None:
    engine, rng = tiny_engine(num_pages=41), random.Random(5)
    stems = random_prompts(4, lens=(10, 40), seed=8)
    held = []
    for _ in range(60):
        action = rng.choice(["hold", "extend", "fork", "sample", "release", "release", "other"])
        handle = rng.choice(held) if held else None
        if action == "other":
            generate(engine, [stems[rng.randrange(4)][: rng.randrange(1, 40)]], greedy(3))
        elif action == "hold" or handle is None:
            held.append(engine.prefix(stems[rng.randrange(4)][: rng.randrange(1, 40)]))
        elif action == "extend":
            held.append(handle.extend([rng.randrange(64) for _ in range(rng.randrange(1, 9))]))
        elif action == "fork":
            held += handle.fork(rng.randrange(3))
        elif action == "sample":
            num, outputs = num_computed(engine, lambda handle=handle: handle.sample(greedy(2, n=2)))
            assert num == 2 * (len(handle.token_ids) - handle.cached_len)
            assert [output.index for output in outputs] == [0, 1]
        else:
            held.remove(handle)
            handle.release()
        engine.check_integrity()
        assert all(handle.cached_len == len(handle.token_ids) - 1 for handle in held)
        while len(held) > 6:
            held.pop(0).release()
    for handle in held:
        handle.release()
    assert_idle(engine)


def test_new_weights_end_handles() -> None:
    """What they held is dropped with them: it could match nothing any more."""
    engine, prompt = tiny_engine(), list(range(60, 110))
    held = engine.prefix(prompt)
    engine.update_params(engine.params)
    with pytest.raises(HandleError, match="the weights were updated"):
        held.sample()
    assert engine.stats().num_evictable_pages == engine.stats().num_protected_pages == 0
    with engine.prefix(prompt) as again:
        assert again.cached_len == len(prompt) - 1
        engine.check_integrity()
    assert_idle(engine)
