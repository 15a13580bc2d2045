"""The engine: ids in, ids out, whatever is asked of it and wherever it is stopped."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from plain_modules import plain_module
from scheduling import num_trie_edges
from tiny import (
    MAX_LEN,
    SMALL,
    TINY,
    VOCAB_SIZE,
    assert_idle,
    counting_llama,
    dense_greedy,
    finish,
    generate,
    greedy,
    random_prompts,
    random_weights,
    tiny_engine,
    tiny_llama,
    token_ids,
)

from radix_jax import Engine, EngineConfig, SamplingParams
from radix_jax.cache import NodeView
from radix_jax.scheduler import QueueView

EOS = 40


@pytest.fixture
def engine() -> Engine:
    return tiny_engine()


@pytest.fixture(scope="module")
def counting_engine() -> Engine:
    """Each token is the one before plus 1, modulo 64, and EOS ends a request."""
    return Engine(counting_llama(), None, EngineConfig(**SMALL), eos_token_ids=[EOS])


@pytest.fixture(scope="module")
def plain_engine() -> Engine:
    """Without the runtime type checks of tests, so that a wrong type reaches the engine's own checks."""
    return plain_module("engine").Engine(tiny_llama(), None, EngineConfig(**SMALL))


def prompts_of(*lens: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in lens]


# ---- outputs


def test_greedy_is_what_the_dense_model_gives(engine: Engine) -> None:
    prompts = prompts_of(1, 2, 3, 4, 5, 17, 63, 64, 65, 100)
    outputs = generate(engine, prompts, greedy(6))
    assert token_ids(outputs) == [dense_greedy(prompt, 6) for prompt in prompts]
    assert_idle(engine)


def test_outputs_are_cumulative_and_name_their_request(engine: Engine) -> None:
    [prompt] = prompts_of(10, seed=1)
    expected = dense_greedy(prompt, 4)
    request_id = engine.add_request(prompt.tolist(), greedy(4))
    seen = []
    while engine.has_unfinished():
        [output] = engine.step()
        [completion] = output.outputs
        assert output.request_id == request_id
        assert output.prompt_token_ids == prompt.tolist()
        assert (output.error, output.prompt, completion.index, completion.text) == (None, None, 0, "")
        assert output.finished is (completion.finish_reason is not None)
        seen.append((completion.token_ids, completion.finish_reason))
    assert seen == [(expected[:1], None), (expected[:2], None), (expected[:3], None), (expected, "length")]
    assert engine.step() == []


def test_a_prompt_longer_than_a_step_gives_nothing_until_its_last_chunk(engine: Engine) -> None:
    engine.add_request(prompts_of(100, seed=2)[0], greedy(2))
    assert engine.step() == []
    assert [len(output.outputs[0].token_ids) for output in engine.step()] == [1]
    finish(engine)


def test_every_request_has_an_id_of_its_own(engine: Engine) -> None:
    request_ids = [engine.add_request([1, 2, 3], greedy(1)) for _ in range(3)]
    assert len(set(request_ids)) == 3
    assert all(isinstance(request_id, str) for request_id in request_ids)
    finish(engine)


@pytest.mark.parametrize(
    "form", [list, tuple, lambda x: x.tolist(), lambda x: x.astype(np.int64), lambda x: x.astype(np.uint16)]
)
def test_ids_may_come_in_any_integer_form(plain_engine: Engine, form: Callable[[np.ndarray], Any]) -> None:
    [prompt] = prompts_of(9, seed=3)
    [output] = generate(plain_engine, [form(prompt)], greedy(2))
    assert output.prompt_token_ids == prompt.tolist()
    assert output.outputs[0].token_ids == dense_greedy(prompt, 2)


def test_a_prompt_is_the_engines_own_copy(engine: Engine) -> None:
    [prompt] = prompts_of(9, seed=4)
    expected = dense_greedy(prompt, 2)
    request_id = engine.add_request(prompt, greedy(2))
    prompt[:] = 0
    assert finish(engine)[request_id].outputs[0].token_ids == expected


# ---- ends


def test_max_tokens_ends_by_length(counting_engine: Engine) -> None:
    [output] = generate(counting_engine, [[1, 5]], greedy(3))
    assert output.outputs[0].token_ids == [6, 7, 8]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)


def test_eos_ends_by_stop_and_names_itself(counting_engine: Engine) -> None:
    [output] = generate(counting_engine, [[1, 38]], greedy(30))
    assert output.outputs[0].token_ids == [39, EOS]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", EOS)


def test_eos_may_be_ignored(counting_engine: Engine) -> None:
    [output] = generate(counting_engine, [[1, 38]], greedy(4, ignore_eos=True))
    assert output.outputs[0].token_ids == [39, EOS, 41, 42]
    assert output.outputs[0].finish_reason == "length"


def test_stop_ids_of_the_request_end_it_too(counting_engine: Engine) -> None:
    params = [
        greedy(9, stop_token_ids=[7, 9]),
        greedy(9, stop_token_ids=[7, 9], ignore_eos=True),
        greedy(9, stop_token_ids=[63]),
        greedy(3, stop_token_ids=[8]),  # the last token allowed is a stop id: "stop"
    ]
    outputs = generate(counting_engine, [[5], [8], [38], [5]], params)
    ends = [(output.outputs[0].token_ids, output.outputs[0].stop_reason) for output in outputs]
    assert ends == [([6, 7], 7), ([9], 9), ([39, EOS], EOS), ([6, 7, 8], 8)]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_stop_ids_in_the_prompt_end_nothing(counting_engine: Engine) -> None:
    [output] = generate(counting_engine, [[EOS, 7, 3]], greedy(3, stop_token_ids=[7]))
    assert output.outputs[0].token_ids == [4, 5, 6]


@pytest.mark.parametrize("max_tokens", [100, None])
def test_output_is_cut_to_the_room_that_the_context_leaves(counting_engine: Engine, max_tokens: int | None) -> None:
    prompt = [0] * (MAX_LEN - 5)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    [output] = generate(counting_engine, [prompt], params)
    assert output.outputs[0].token_ids == [1, 2, 3, 4, 5]
    assert output.outputs[0].finish_reason == "length"


def test_no_limit_takes_all_that_the_pool_leaves() -> None:
    engine = tiny_engine(num_pages=20)  # 76 tokens, and the last token of an output needs no slot
    [output] = generate(engine, prompts_of(70, seed=5), SamplingParams(temperature=0.0, max_tokens=None))
    assert len(output.outputs[0].token_ids) == 7
    assert_idle(engine)


# ---- refusals


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    engine = tiny_engine()
    with pytest.raises(ValueError, match=rf"logit_bias id {VOCAB_SIZE} is outside the vocabulary \[0, {VOCAB_SIZE}\)"):
        engine.add_request([1], SamplingParams(logit_bias={3: 1.0, VOCAB_SIZE: 1.0}))
    assert not engine.has_unfinished()
    engine.add_request([1], greedy(1, logit_bias={VOCAB_SIZE - 1: 100.0}))
    [output] = finish(engine).values()
    assert output.outputs[0].token_ids == [VOCAB_SIZE - 1]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([], ValueError, "empty prompt: a request needs at least 1 token"),
        (np.zeros(0, np.int32), ValueError, "empty prompt"),
        ([3, -1], ValueError, rf"token id -1 at place 1 is outside the vocabulary \[0, {VOCAB_SIZE}\)"),
        ([VOCAB_SIZE, 3], ValueError, rf"token id {VOCAB_SIZE} at place 0 is outside the vocabulary"),
        ([2**40], ValueError, f"token id {2**40} at place 0 is outside the vocabulary"),
        ([2**70], TypeError, "must be a flat sequence of ints"),
        ([1.5], TypeError, "must be a flat sequence of ints"),
        (np.array([1.0]), TypeError, "must be a flat sequence of ints, got shape .* of float64"),
        ([True, 3], TypeError, "must be ints, got a bool"),
        (np.array([True]), TypeError, "must be a flat sequence of ints"),
        ([[1, 2]], TypeError, "must be a flat sequence of ints"),
        ([[1], [1, 2]], TypeError, "must be a flat sequence of ints, got sequences of several lengths"),
        ([np.True_, 5], TypeError, "must be ints, got a bool"),
        (None, TypeError, "must be a flat sequence of ints"),
        (5, TypeError, "must be a flat sequence of ints"),
        (
            [1] * MAX_LEN,
            ValueError,
            f"prompt of {MAX_LEN} tokens exceeds max_model_len={MAX_LEN}, which holds at least one output token too; "
            "raise max_model_len or shorten it",
        ),
        ([1] * 500, ValueError, f"prompt of 500 tokens exceeds max_model_len={MAX_LEN}"),
    ],
)
def test_bad_prompts_are_refused_and_the_next_request_works(
    plain_engine: Engine, ids: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plain_engine.add_request(ids, greedy(1))
    assert not plain_engine.has_unfinished()
    [output] = generate(plain_engine, [[1, 2, 3]], greedy(2))
    assert output.outputs[0].token_ids == dense_greedy([1, 2, 3], 2)
    assert_idle(plain_engine)


def test_bad_arguments_are_refused_and_the_next_request_works(plain_engine: Engine) -> None:
    for priority in (1.5, "high", True):
        with pytest.raises(TypeError, match=r"priority=.* is not an int"):
            plain_engine.add_request([1], priority=priority)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="unhashable"):
        plain_engine.add_request([1], routing_key=["a"])  # pyright: ignore[reportArgumentType]
    namespace: Any = ["unhashable"]
    with pytest.raises(TypeError, match="namespace"):
        plain_engine.add_request([1], namespace=namespace)
    sampling: Any = {"temperature": 0.0}
    with pytest.raises(TypeError, match="sampling is a dict; give SamplingParams"):
        plain_engine.add_request([1], sampling)
    assert not plain_engine.has_unfinished()
    [output] = generate(plain_engine, [[1, 2, 3]], greedy(2))
    assert output.outputs[0].token_ids == dense_greedy([1, 2, 3], 2)
    assert_idle(plain_engine)


def test_what_fails_in_an_add_ends_nobody_else(plain_engine: Engine) -> None:
    class Unlucky:
        def __hash__(self) -> int:
            raise ZeroDivisionError

    deep: tuple[Any, ...] = ()
    for _ in range(10_000):
        deep = (deep,)
    other = plain_engine.add_request([1, 2, 3], greedy(2))
    plain_engine.step()
    with pytest.raises(ZeroDivisionError):
        plain_engine.add_request([1], namespace=Unlucky())
    with pytest.raises(RecursionError):
        plain_engine.add_request([1], namespace=deep)
    for priority in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match="priority is outside"):
            plain_engine.add_request([1], priority=priority)
    no_id: Any = []
    with pytest.raises(TypeError, match="unhashable"):
        plain_engine.abort(no_id)
    assert finish(plain_engine)[other].outputs[0].token_ids == dense_greedy([1, 2, 3], 2)
    assert_idle(plain_engine)


# ---- abort


def test_abort_of_a_waiting_request(engine: Engine) -> None:
    request_id = engine.add_request([1, 2, 3], greedy(5))
    assert engine.unfinished == {request_id}
    output = engine.abort(request_id)
    assert output is not None
    assert (output.finished, output.outputs[0].token_ids, output.outputs[0].finish_reason) == (True, [], "abort")
    assert not engine.has_unfinished()
    assert_idle(engine)


def test_abort_of_a_request_in_each_later_state_leaves_the_others_alone(engine: Engine) -> None:
    """After the first chunk of its prompt, after its last one, and after some decode steps."""
    [victim, other] = prompts_of(100, 20, seed=6)
    victims, others = dense_greedy(victim, 8), dense_greedy(other, 8)
    for num_steps, num_tokens in ((1, 0), (2, 1), (3, 2), (6, 5)):
        engine.flush_cache()
        victim_id = engine.add_request(victim, greedy(8))
        other_id = engine.add_request(other, greedy(8))
        last = {}
        for _ in range(num_steps):
            last |= {output.request_id: output for output in engine.step()}
        output = engine.abort(victim_id)
        assert output is not None
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == victims[:num_tokens]
        engine.check_integrity()
        assert engine.stats().num_running + engine.stats().num_waiting == 1
        last |= finish(engine)
        assert victim_id not in last or not last[victim_id].finished
        assert last[other_id].outputs[0].token_ids == others
        assert_idle(engine)


def test_abort_of_what_is_not_there(engine: Engine) -> None:
    assert engine.abort("no such id") is None
    request_id = engine.add_request([1, 2], greedy(1))
    finish(engine)
    assert engine.abort(request_id) is None


def test_chunks_of_an_aborted_prompt_are_hits_for_the_next_one(engine: Engine) -> None:
    [prompt] = prompts_of(100, seed=7)
    request_id = engine.add_request(prompt, greedy(1))
    engine.step()
    engine.abort(request_id)
    [output] = generate(engine, [prompt], greedy(3))
    assert output.cached_tokens == (99 if engine.config.overlap else 64), "two chunks were sent, or one"
    assert output.outputs[0].token_ids == dense_greedy(prompt, 3)


# ---- stream


def test_stream_gives_token_by_token(engine: Engine) -> None:
    [prompt] = prompts_of(10, seed=8)
    outputs = list(engine.stream(prompt, greedy(4)))
    expected = dense_greedy(prompt, 4)
    assert [output.outputs[0].token_ids for output in outputs] == [expected[:n] for n in (1, 2, 3, 4)]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert_idle(engine)


def test_a_closed_stream_aborts_its_request(engine: Engine) -> None:
    stream = engine.stream(prompts_of(10, seed=8)[0], greedy(50))
    next(stream)
    assert engine.has_unfinished()
    stream.close()
    assert not engine.has_unfinished()
    assert_idle(engine)


def test_closing_a_stream_that_has_not_begun_aborts_its_request(engine: Engine) -> None:
    stream = engine.stream([1, 2, 3], greedy(50))
    assert engine.has_unfinished()
    stream.close()
    assert not engine.has_unfinished()
    engine.stream([1, 2, 3], greedy(50))  # and so does letting go of it
    assert_idle(engine)


def test_a_stream_refuses_on_the_call(engine: Engine) -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        engine.stream([], greedy(1))


def test_streams_side_by_side_lose_nothing(engine: Engine) -> None:
    prompts, lens = prompts_of(10, 7, 12, seed=9), (6, 3, 4)
    streams = [engine.stream(prompt, greedy(n)) for prompt, n in zip(prompts, lens, strict=True)]
    for prompt, n, stream in zip(prompts, lens, streams, strict=True):
        expected = dense_greedy(prompt, n)
        assert [output.outputs[0].token_ids for output in stream] == [expected[:end] for end in range(1, n + 1)]
    assert_idle(engine)


def test_a_stream_tells_of_an_abort_and_of_a_drop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = engine.stream([1, 2, 3], greedy(50))
    next(stream)
    [request_id] = engine.unfinished
    engine.abort(request_id)
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]

    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    one, other = engine.stream([1, 2, 3], greedy(50)), engine.stream([4, 5], greedy(50))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(one)
    with pytest.raises(RuntimeError, match="was dropped"):
        next(other)
    assert_idle(engine)


# ---- cache


def test_a_second_turn_reuses_the_first_ones_output(engine: Engine) -> None:
    [prompt, suffix] = prompts_of(21, 6, seed=9)
    [first] = generate(engine, [prompt], greedy(12))
    second_prompt = [*first.prompt_token_ids, *first.outputs[0].token_ids, *suffix.tolist()]
    [second] = generate(engine, [second_prompt], greedy(4))
    assert second.prompt_token_ids == second_prompt
    # The last output token was never fed back: its KV does not exist.
    assert second.cached_tokens == (21 + 12 - 1) // 4 * 4
    assert second.outputs[0].token_ids == dense_greedy(second_prompt, 4)


def test_flush_needs_an_idle_engine(engine: Engine) -> None:
    [prompt] = prompts_of(20, seed=10)
    engine.add_request(prompt, greedy(3))
    with pytest.raises(
        RuntimeError, match="0 running and 1 waiting requests use the cache; finish or abort them first"
    ):
        engine.flush_cache()
    engine.step()
    with pytest.raises(RuntimeError, match="1 running and 0 waiting"):
        engine.flush_cache()
    finish(engine)
    [again] = generate(engine, [prompt], greedy(1))
    assert again.cached_tokens == 19
    engine.flush_cache()
    assert engine.stats().num_evictable_pages == 0
    [afresh] = generate(engine, [prompt], greedy(1))
    assert afresh.cached_tokens == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_each_shared_page_is_computed_once(page_size: int) -> None:
    """Requests that come together wait for the first of their group to compute what they share."""
    engine = tiny_engine(page_size=page_size, num_pages=800 // page_size, partial_pages=False)
    rng = np.random.default_rng(11)
    stems = [rng.integers(0, VOCAB_SIZE, length) for length in (30, 23, 9)]
    prompts = [np.append(stem, [tail, tail, 7]).astype(np.int32) for stem in stems for tail in range(4)]
    before = engine.stats()
    generate(engine, prompts, greedy(1))
    after = engine.stats()
    num_computed = after.num_prefill_tokens - before.num_prefill_tokens
    assert num_computed == num_trie_edges(prompts, page_size)
    num_tokens = sum(map(len, prompts))
    assert after.num_prompt_tokens - before.num_prompt_tokens == num_tokens
    assert after.num_cached_tokens - before.num_cached_tokens == num_tokens - num_computed


def test_without_the_cache_all_is_computed() -> None:
    engine = tiny_engine(enable_prefix_cache=False)
    [prompt] = prompts_of(30, seed=12)
    before = engine.stats()
    outputs = generate(engine, [prompt] * 3, greedy(2)) + generate(engine, [prompt], greedy(2))
    assert token_ids(outputs) == [dense_greedy(prompt, 2)] * 4
    assert [output.cached_tokens for output in outputs] == [0] * 4
    assert engine.stats().num_prefill_tokens - before.num_prefill_tokens == 4 * 30
    assert engine.stats().num_evictable_pages == 0


# ---- the rest


def test_stats_add_up(counting_engine: Engine) -> None:
    counting_engine.flush_cache()
    before = counting_engine.stats()
    generate(counting_engine, [[0] * 10, [1] * 6], [greedy(3), greedy(5)])
    after = counting_engine.stats()
    changes = {name: value - getattr(before, name) for name, value in vars(after).items()}
    assert changes["num_prompt_tokens"] == changes["num_prefill_tokens"] == 16
    assert changes["num_output_tokens"] == 8
    assert changes["num_cached_tokens"] == changes["num_evicted_tokens"] == 0
    assert (changes["num_prefill_steps"], changes["num_decode_steps"]) == (1, 4)
    assert after.num_evictable_pages == 3 + 3  # of 12 and 10 tokens with KV
    assert after.num_free_pages == SMALL["num_pages"] - 1 - 6
    assert 0 < after.padding_waste < 1


def test_stats_of_a_fresh_engine() -> None:
    stats = Engine(tiny_llama(), None, EngineConfig(**SMALL)).stats()
    assert (stats.hit_rate, stats.padding_waste, stats.compile_s, stats.num_compiles) == (0.0, 0.0, 0.0, 0)
    assert stats.num_free_pages == SMALL["num_pages"] - 1


@pytest.mark.parametrize("place", ["dispatch", "read"])
def test_a_step_that_fails_drops_its_requests_and_the_cache(
    place: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Ctrl-C may, at any statement of a step."""
    [prompt] = prompts_of(20, seed=13)
    generate(engine, [prompt], greedy(1))
    engine.add_request(prompt, greedy(5))
    engine.add_request([1, 2], greedy(5))
    engine.step()

    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert "a step did not finish" in caplog.text
    assert not engine.has_unfinished()
    assert_idle(engine)
    [output] = generate(engine, [prompt], greedy(3))
    assert output.cached_tokens == 0
    assert output.outputs[0].token_ids == dense_greedy(prompt, 3)


def test_an_add_that_is_interrupted_leaves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C may, at any statement."""
    engine.add_request([1, 2, 3], greedy(5))

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "peek", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.add_request([1, 2, 3, 4, 5, 6], greedy(5))
    assert not engine.has_unfinished()
    assert_idle(engine)
    [output] = generate(engine, [[1, 2, 3]], greedy(2))
    assert output.outputs[0].token_ids == dense_greedy([1, 2, 3], 2)


def test_an_abort_that_is_interrupted_leaves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request_id = engine.add_request([1, 2, 3], greedy(5))
    engine.add_request([4, 5, 6], greedy(5))
    engine.step()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache.pool, "free", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.abort(request_id)
    assert not engine.has_unfinished()
    assert_idle(engine)
    [output] = generate(engine, [[1, 2, 3]], greedy(2))
    assert output.outputs[0].token_ids == dense_greedy([1, 2, 3], 2)


@pytest.mark.parametrize("lost", [True, False])
def test_a_pool_is_made_anew_whether_it_is_lost_or_not(engine: Engine, lost: bool) -> None:
    engine.flush_cache()
    before = engine.runner.kv
    if lost:
        before.delete()
    engine.runner.renew_pool()
    assert before.is_deleted()
    assert not engine.runner.kv.is_deleted()
    [output] = generate(engine, [[1, 2, 3]], greedy(2))
    assert output.outputs[0].token_ids == dense_greedy([1, 2, 3], 2)


def test_close_gives_the_pool_back() -> None:
    engine = Engine(tiny_llama(), None, EngineConfig(**SMALL))
    kv = engine.runner.kv
    engine.add_request([1, 2, 3])
    engine.close()
    assert kv.is_deleted()
    assert not engine.has_unfinished()
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed; make a new one"):
        engine.add_request([1, 2, 3])
    # The model is the caller's own, and lives on.
    assert not tiny_llama().embed.get_value().is_deleted()


def test_rules_of_ones_own_order_the_queue_and_the_evictions() -> None:
    evicted: list[int] = []

    def newest_prompt(view: QueueView) -> int:
        return -view.arrival

    def largest_first(view: NodeView) -> int:
        evicted.append(view.num_tokens)
        return -view.num_tokens

    engine = tiny_engine(
        schedule_policy=newest_prompt, eviction_policy=largest_first, max_running_requests=1, num_pages=20
    )
    prompts = prompts_of(30, 30, 30, seed=5)
    ids = [engine.add_request(prompt, greedy(2)) for prompt in prompts]
    order: list[str] = []
    while engine.has_unfinished():
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ids[::-1]
    assert evicted
    assert_idle(engine)


def test_a_config_with_weights_is_a_model_too() -> None:
    engine = Engine(TINY, random_weights(TINY), EngineConfig(**SMALL))
    [output] = generate(engine, [[5, 6, 7]], greedy(2))
    assert output.outputs[0].token_ids == dense_greedy([5, 6, 7], 2)


def test_settings_are_filled_in() -> None:
    config = Engine(tiny_llama(), None, EngineConfig(max_running_requests=4)).config
    assert (config.dtype, config.kv_dtype, config.max_model_len) == ("float32", "float32", MAX_LEN)
    assert config.num_pages == 4 * MAX_LEN // 16 + 1


def test_first_use_compiles_and_is_entered(counting_engine: Engine) -> None:
    for _ in range(2):  # the second one copies a part of a page
        generate(counting_engine, [[1, 2]], greedy(2))
    records = counting_engine.ledger.records
    assert {record.reason for record in records} == {"first use"}
    assert sorted(record.bucket.kind for record in records) == ["copy", "decode", "prefill"]
    assert counting_engine.stats().num_compiles == 3
    assert counting_engine.stats().compile_s == sum(record.seconds_s for record in records) > 0
    generate(counting_engine, [[1, 2]], greedy(2))
    assert len(counting_engine.ledger.records) == 3


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", [0, 1, 2, 3]), ("shortest-prefill-first", [3, 2, 1, 0]), ("lpm", [3, 0, 1, 2])]
)
def test_policies_choose_who_runs_and_never_what_comes_out(policy: str, order: list[int]) -> None:
    engine = tiny_engine(schedule_policy=policy, max_running_requests=1)
    [cached] = prompts_of(40, seed=14)
    generate(engine, [cached], greedy(1))
    prompts = [*prompts_of(50, 30, 8, seed=15), np.append(cached[:36], [1, 2, 3, 4]).astype(np.int32)]
    request_ids = [engine.add_request(prompt, greedy(6)) for prompt in prompts]
    outputs = finish(engine)
    assert [outputs[request_id].outputs[0].token_ids for request_id in request_ids] == [
        dense_greedy(prompt, 6) for prompt in prompts
    ]
    finished = list(outputs)
    assert [request_ids.index(request_id) for request_id in finished] == order


def test_random_prompts_differ() -> None:
    """What the tests here stand on: other prompts give other tokens."""
    outputs = [tuple(dense_greedy(prompt, 3)) for prompt in random_prompts(20, lens=(5, 60), seed=16)]
    assert len(set(outputs)) == 20
