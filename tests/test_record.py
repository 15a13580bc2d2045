"""Recordings: every request once, whatever ends it, and a replay that does what the engine did."""

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import SMALL, finish, generate, greedy, random_prompts, tiny_llama

from radix_jax import Engine, EngineConfig
from radix_jax.replay import CostModel, read_trace, simulate
from radix_jax.request import RecordedRequest


def recording_engine(path: Path, **fields: Any) -> Engine:
    return Engine(tiny_llama(), None, EngineConfig(**(SMALL | {"record": str(path)} | fields)))


def records(path: Path) -> list[RecordedRequest]:
    return [RecordedRequest.from_json(line) for line in path.read_text().splitlines()]


def admitted_step(engine: Engine, request_id: str) -> int:
    """The step that let a request in first."""
    return next(event.step for event in engine.explain(request_id).events if event.kind == "admitted")


def test_a_replay_does_what_the_engine_did(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    # Room for few requests at a time and for few cached prefixes; no overlap, as in a replay.
    engine = recording_engine(path, num_pages=48, overlap=False)
    first, *others = random_prompts(14, lens=(8, 60), num_stems=3, seed=5)
    request_ids = [engine.add_request(first, greedy(4), priority=1)]
    engine.step()
    request_ids += [engine.add_request(prompt, greedy(3 + place % 5)) for place, prompt in enumerate(others)]
    outputs = finish(engine)
    stats = engine.stats()
    assert stats.num_evicted_tokens > 0
    assert stats.num_cached_tokens > 0

    # A step takes longer than all the requests took to come, so the first one runs alone, as it did.
    trace = read_trace(path)
    assert trace.max_len <= SMALL["max_model_len"]
    replayed = simulate(trace, engine.config, CostModel(per_step_s=1000.0))
    assert [times.cached_len for times in replayed.requests] == [outputs[each].cached_tokens for each in request_ids]
    assert replayed.stats.num_prefill_tokens == stats.num_prefill_tokens
    assert replayed.stats.num_steps == {
        "prefill": stats.num_prefill_steps,
        "decode": stats.num_decode_steps,
        "mixed": stats.num_mixed_steps,
    }
    steps = {place: admitted_step(engine, request_id) for place, request_id in enumerate(request_ids)}
    by_time = itertools.groupby(replayed.admitted, key=lambda place: replayed.requests[place].admitted_s)
    groups = [{steps[place] for place in places} for _, places in by_time]
    assert len(groups) > 5
    assert all(len(group) == 1 for group in groups)
    assert [min(group) for group in groups] == sorted(set(steps.values()))
    engine.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


@pytest.fixture
def engine(path: Path) -> Engine:
    return recording_engine(path)


def test_every_way_to_end_is_recorded_once(path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(6, lens=(5, 20), seed=1)
    [finished] = generate(engine, prompts[:1], greedy(3))
    engine.add_request(prompts[1], greedy(20), namespace=("tenant", 1), priority=2)
    waiting = engine.add_request(prompts[2], greedy(20))
    engine.abort(waiting)
    assert engine.abort(waiting) is None
    for _ in range(4):
        engine.step()
    assert len(records(path)) == 2

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert len(records(path)) == 3
    engine.add_request(prompts[3], greedy(20))
    engine.step()
    engine.close()
    engine.close()

    done, aborted, dropped, closed = records(path)
    assert [len(each.output_ids) for each in (done, aborted)] == [3, 0]
    assert 0 < len(dropped.output_ids) < 20
    assert len(closed.output_ids) < 20
    assert done.output_ids.tolist() == finished.outputs[0].token_ids
    assert (dropped.namespace, dropped.priority, dropped.max_tokens) == (("tenant", 1), 2, 20)
    for record, prompt in zip((done, aborted, dropped, closed), [prompts[i] for i in (0, 2, 1, 3)], strict=True):
        np.testing.assert_array_equal(record.token_ids, prompt)
    # Lines come in the order of the ends, a trace in that of arrivals.
    assert 0 <= done.arrival_s < dropped.arrival_s < aborted.arrival_s < closed.arrival_s
    trace = read_trace(path)
    assert [one.prompt_ids().tolist() for one in trace] == [prompt.tolist() for prompt in prompts[:4]]
    assert [one.prompt_len for one in read_trace(path, limit=2)] == [len(prompt) for prompt in prompts[:2]]


@pytest.mark.parametrize("priority", [2**63 - 1, -(2**63)])
def test_extreme_priorities_are_recorded(path: Path, engine: Engine, priority: int) -> None:
    engine.add_request([1, 2, 3], greedy(1), priority=priority)
    finish(engine)
    assert [one.priority for one in read_trace(path)] == [priority]


def test_a_timed_out_request_is_recorded(path: Path) -> None:
    engine = recording_engine(path, queue_timeout_s=1e-9)
    engine.add_request([1, 2, 3], greedy(4))
    finish(engine)
    assert [(record.token_ids.tolist(), len(record.output_ids)) for record in records(path)] == [([1, 2, 3], 0)]


def test_an_older_file_is_replaced(path: Path) -> None:
    path.write_text("of another run\n")
    recording_engine(path)
    assert path.read_text() == ""


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"record='.*/nowhere/requests\.jsonl' can't be written: No such file"):
        recording_engine(tmp_path / "nowhere" / "requests.jsonl")


def test_a_namespace_that_json_has_no_form_for_is_refused(path: Path, engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"namespace frozenset\(\) can't be recorded"):
        engine.add_request([1, 2, 3], greedy(2), namespace=frozenset())
    assert not engine.has_unfinished()
    engine.add_request([1, 2, 3], greedy(2))
    finish(engine)
    assert len(records(path)) == 1


def test_requests_go_on_where_the_disk_does_not(path: Path, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.ERROR, logger="radix_jax"):
        outputs = generate(engine, [[1, 2, 3], [4, 5]], greedy(2))
    assert all(output.finished for output in outputs)
    assert caplog.text.count("the recording ends here") == 1
