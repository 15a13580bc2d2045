"""Several samples of one request: one RequestOutput, one prefill, and what single requests would say."""

import math
from pathlib import Path
from typing import Any

import pytest
from tiny import (
    SMALL,
    assert_idle,
    dense_drawn,
    dense_greedy,
    drawn,
    finish,
    generate,
    greedy,
    random_prompts,
    samples,
    tiny_engine,
    tiny_llama,
)

from radix_jax import Engine, EngineConfig
from radix_jax.replay import CostModel, read_trace, simulate
from radix_jax.scheduler import QueueFull

[PROMPT] = random_prompts(1, lens=(21, 22), seed=50)


@pytest.fixture
def engine() -> Engine:
    return tiny_engine()


def test_each_sample_is_what_its_index_and_the_seed_say(engine: Engine) -> None:
    [output] = generate(engine, [PROMPT], drawn(8, 7, n=4))
    assert samples(output) == [dense_drawn(PROMPT, 8, 7, index) for index in range(4)]
    assert len({tuple(ids) for ids in samples(output)}) == 4
    assert (output.finished, output.prompt_token_ids) == (True, PROMPT.tolist())
    # The first one is that of a request of one sample.
    assert samples(generate(engine, [PROMPT], drawn(8, 7))[0]) == samples(output)[:1]
    assert_idle(engine)


def test_greedy_samples_are_alike(engine: Engine) -> None:
    [output] = generate(engine, [PROMPT], greedy(5, n=3))
    assert samples(output) == [dense_greedy(PROMPT, 5)] * 3


def test_without_a_seed_samples_and_requests_differ(engine: Engine) -> None:
    outputs = generate(engine, [PROMPT] * 2, drawn(8, None, n=3))
    assert len({tuple(ids) for output in outputs for ids in samples(output)}) == 6


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prompt_len", [1, 16, 17, 30])
def test_tokens_of_the_prefill(prompt_len: int, page_size: int, enable_prefix_cache: bool) -> None:
    engine = tiny_engine(page_size=page_size, enable_prefix_cache=enable_prefix_cache, max_prefill_tokens=128)
    [prompt] = random_prompts(1, lens=(prompt_len, prompt_len + 1), seed=51)
    n, before = 5, engine.stats()
    [output] = generate(engine, [prompt], greedy(3, n=n))
    after = engine.stats()
    num_rest = prompt_len - math.floor((prompt_len - 1) / page_size) * page_size
    assert after.num_prefill_tokens - before.num_prefill_tokens == prompt_len + (n - 1) * num_rest
    assert after.num_prefill_steps - before.num_prefill_steps == 1
    assert after.num_prompt_tokens - before.num_prompt_tokens == prompt_len
    assert (after.num_cached_tokens - before.num_cached_tokens, output.cached_tokens) == (0, 0)
    assert after.num_output_tokens - before.num_output_tokens == 3 * n
    assert_idle(engine)
    assert after.num_evictable_pages == 0 or enable_prefix_cache


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("partial_pages", [True, False])
def test_more_samples_than_may_run(partial_pages: bool, enable_prefix_cache: bool) -> None:
    engine = tiny_engine(
        max_running_requests=3, partial_pages=partial_pages, enable_prefix_cache=enable_prefix_cache, page_size=4
    )
    before = engine.stats()
    [output] = generate(engine, [PROMPT], drawn(6, 7, n=11))
    assert samples(output) == [dense_drawn(PROMPT, 6, 7, index) for index in range(11)]
    assert output.cached_tokens == 0
    num_computed = engine.stats().num_prefill_tokens - before.num_prefill_tokens
    assert num_computed == 21 + 10 * 1, "the prompt has a page and one token, so that nobody computes more than one"
    assert_idle(engine)


def test_a_hit_counts_once(engine: Engine) -> None:
    generate(engine, [PROMPT], greedy(1))
    before = engine.stats()
    [output] = generate(engine, [PROMPT], greedy(2, n=4))
    assert output.cached_tokens == 20
    after = engine.stats()
    assert after.num_cached_tokens - before.num_cached_tokens == 20
    assert after.num_prompt_tokens - before.num_prompt_tokens == 21


def test_outputs_are_cumulative_and_end_with_the_last_sample(engine: Engine) -> None:
    ids = [dense_drawn(PROMPT, 10, 7, index) for index in range(3)]
    # Sample 1 ends at its third token, sample 0 and 2 later.
    stop_id = ids[1][2]
    lens = [each.index(stop_id) + 1 if stop_id in each else 10 for each in ids]
    assert lens[1] == 3
    request_id = engine.add_request(PROMPT, drawn(10, 7, n=3, stop_token_ids=[stop_id]))
    assert engine.unfinished == {request_id}
    seen = []
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id == request_id
            assert output.finished is all(each.finish_reason is not None for each in output.outputs)
            seen.append(samples(output))
    assert seen == [[each[: min(n, stop)] for each, stop in zip(ids, lens, strict=True)] for n in range(1, 11)]
    assert engine.unfinished == frozenset()
    assert [each.finish_reason for each in output.outputs] == ["stop" if n < 10 else "length" for n in lens]


def test_a_stream_gives_all_samples(engine: Engine) -> None:
    own = engine.add_request([1, 2, 3], greedy(20))
    outputs = list(engine.stream(PROMPT, drawn(5, 7, n=3)))
    assert [output.finished for output in outputs] == [False] * 4 + [True]
    assert samples(outputs[-1]) == [dense_drawn(PROMPT, 5, 7, index) for index in range(3)]
    assert engine.unfinished == {own}
    finish(engine)
    stream = engine.stream(PROMPT, drawn(50, 7, n=3))
    next(stream)
    stream.close()
    assert not engine.has_unfinished()
    assert_idle(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 4])
@pytest.mark.parametrize("max_running_requests", [2, 8])
def test_an_abort_ends_all_samples(max_running_requests: int, num_steps: int) -> None:
    engine = tiny_engine(max_running_requests=max_running_requests)
    request_id = engine.add_request(PROMPT, drawn(20, 7, n=4))
    other = engine.add_request([1, 2, 3], greedy(9))
    for _ in range(num_steps):
        engine.step()
    output = engine.abort(request_id)
    assert output is not None
    assert (output.finished, [each.finish_reason for each in output.outputs]) == (True, ["abort"] * 4)
    assert samples(output) == [dense_drawn(PROMPT, len(ids), 7, index) for index, ids in enumerate(samples(output))]
    assert engine.abort(request_id) is None
    engine.check_integrity()
    assert finish(engine)[other].outputs[0].token_ids == dense_greedy([1, 2, 3], 9)
    assert_idle(engine)


def test_an_abort_after_some_samples_ended(engine: Engine) -> None:
    ids = dense_drawn(PROMPT, 2, 7, 1)
    request_id = engine.add_request(PROMPT, drawn(20, 7, n=2, stop_token_ids=[ids[1]]))
    for _ in range(6):
        engine.step()
    output = engine.abort(request_id)
    assert output is not None
    assert [each.finish_reason for each in output.outputs] == ["abort", "stop"]
    assert samples(output)[1] == ids
    assert_idle(engine)


def test_a_time_out_ends_all_samples_and_counts_once() -> None:
    engine = Engine(tiny_llama(), None, EngineConfig(**SMALL, queue_timeout_s=1e-9))
    request_id = engine.add_request(PROMPT, greedy(4, n=3))
    output = finish(engine)[request_id]
    assert [each.stop_reason for each in output.outputs] == ["queue_timeout_s=1e-09"] * 3
    assert engine.stats().num_timed_out == 1
    assert_idle(engine)


def test_each_sample_can_be_explained(engine: Engine) -> None:
    request_id = engine.add_request(PROMPT, greedy(4, n=3))
    for name in (request_id, f"{request_id}.1", f"{request_id}.2"):
        assert engine.explain(name).status == "waiting"
    with pytest.raises(KeyError, match="nothing is known of request"):
        engine.explain(f"{request_id}.3")
    assert engine.abort(f"{request_id}.1") is None, "a caller's request is aborted as a whole"
    finish(engine)
    chunks = [
        [(event.start, event.end) for event in engine.explain(name).events if event.kind == "chunk"]
        for name in (request_id, f"{request_id}.1", f"{request_id}.2")
    ]
    assert chunks == [[(0, 21)], [(20, 21)], [(20, 21)]]


def test_a_queue_takes_a_request_whole_or_not() -> None:
    engine = tiny_engine(max_queued_requests=3)
    with pytest.raises(ValueError, match="n=4 samples never fit max_queued_requests=3"):
        engine.add_request(PROMPT, greedy(4, n=4))
    engine.add_request([1, 2], greedy(4))
    with pytest.raises(QueueFull, match="1 requests wait and 3 samples come"):
        engine.add_request(PROMPT, greedy(4, n=3))
    engine.step()
    request_id = engine.add_request(PROMPT, greedy(4, n=3))
    assert samples(finish(engine)[request_id]) == [dense_greedy(PROMPT, 4)] * 3


@pytest.mark.parametrize("overlap", [True, False])
def test_priorities_take_the_places_of_samples(overlap: bool) -> None:
    engine = tiny_engine(max_running_requests=2, preemption_threshold=1, overlap=overlap)
    before = engine.stats()
    low = engine.add_request(PROMPT, drawn(12, 7, n=3))
    for _ in range(4):
        engine.step()
    high = engine.add_request([1, 2, 3], greedy(6, n=2), priority=1)
    outputs = finish(engine)
    assert samples(outputs[low]) == [dense_drawn(PROMPT, 12, 7, index) for index in range(3)]
    assert samples(outputs[high]) == [dense_greedy([1, 2, 3], 6)] * 2
    assert engine.stats().num_retractions - before.num_retractions >= 2


def test_a_recording_has_a_line_a_sample_and_a_replay_shares_as_they_did(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    fields: dict[str, Any] = SMALL | {"record": str(path), "overlap": False, "max_running_requests": 3}
    engine = Engine(tiny_llama(), None, EngineConfig(**fields))
    [output] = generate(engine, [PROMPT], drawn(5, 7, n=5))
    trace = read_trace(path)
    assert [one.prompt_ids().tolist() for one in trace] == [PROMPT.tolist()] * 5
    assert sorted(trace.output_ids(place).tolist() for place in range(5)) == sorted(samples(output))
    stats, replayed = engine.stats(), simulate(trace, engine.config, CostModel(per_step_s=1000.0)).stats
    assert replayed.num_prefill_tokens == stats.num_prefill_tokens
    assert replayed.num_steps["decode"] == stats.num_decode_steps
