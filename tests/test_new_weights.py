"""New weights under a running engine: who goes on with which KV, what is told of it, and what nobody shares."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixed_weights import check_output
from plain_modules import plain_module
from tiny import (
    SMALL,
    assert_idle,
    dense_greedy,
    drawn,
    finish,
    generate,
    greedy,
    random_prompts,
    share_programs,
    tiny_llama,
)

from radix_jax import Engine, EngineConfig, RequestOutput
from radix_jax.cache import of_weights
from radix_jax.models.registry import params_of
from radix_jax.request import FinishAt, RecordedRequest

OLD, NEW, NEWEST = (tiny_llama(seed=seed) for seed in (0, 1, 2))
PARAMS = [params_of(module) for module in (OLD, NEW, NEWEST)]
SEED = 7
[A, B, C, D, W] = random_prompts(5, lens=(17, 30), seed=3)
[LONG] = random_prompts(1, lens=(118, 119), seed=4)
LIKE_A = np.concatenate([A, W])


def make_engine(**fields: Any) -> Engine:
    """An engine of its own over OLD, with the programs of others."""
    config = EngineConfig(**(SMALL | {"num_pages": 200, "max_prefill_tokens": 32} | fields))
    return share_programs(Engine(OLD, None, config), OLD)


def namespaces(engine: Engine) -> set[Hashable]:
    """Of all that is cached."""
    return {node.namespace for node in engine.cache.tree.snapshot().nodes if node.state != "root"}


def assert_all_is_of(engine: Engine, version: int) -> None:
    """Idle, and what is cached was computed by weights of this version, as far as requests can tell."""
    assert_idle(engine)
    assert namespaces(engine) <= {of_weights(None, version)}
    for prompt in (A, B, C, D, W, LONG, LIKE_A):
        [output] = generate(engine, [prompt], greedy(2))
        assert output.outputs[0].token_ids == dense_greedy(prompt, 2, (OLD, NEW, NEWEST)[version])


class Busy:
    """An engine with requests that decode, one of four samples among them, one whose prompt is computed in part, one
    that was retracted with some output, and two that only wait."""

    def __init__(self, **fields: Any):
        self.engine = engine = make_engine(**fields)
        self.decoding = [engine.add_request(prompt, greedy(30)) for prompt in (A, B, C)]
        self.group = engine.add_request(W, drawn(25, SEED, n=4))
        self.retracted = engine.add_request(D, greedy(30))
        for _ in range(6):
            engine.step()
        # There are 8 rows, so it takes one.
        self.partial = engine.add_request(LONG, greedy(5, prompt_logprobs=0), priority=1)
        while not any(event.kind == "chunk" for event in engine.explain(self.partial).events):
            engine.step()
        self.waiting = [engine.add_request(prompt, greedy(4)) for prompt in (LIKE_A, D)]
        statuses = {name: engine.explain(name) for name in engine.unfinished}
        assert all(statuses[name].status == "running" for name in (*self.decoding, self.group, self.partial))
        assert all(statuses[name].status == "waiting" for name in (*self.waiting, self.retracted))
        assert "retracted" in [event.kind for event in statuses[self.retracted].events]
        assert max(event.end for event in statuses[self.partial].events if event.kind == "chunk") < len(LONG)

    @property
    def begun(self) -> list[str]:
        return [*self.decoding, self.group, self.retracted, self.partial]

    def check(self, outputs: dict[str, RequestOutput]) -> None:
        """Each token follows from the weights that the engine names."""
        for name in (*self.begun, *self.waiting):
            check_output(self.engine, outputs[name], PARAMS, SEED if name == self.group else None)


MODES = pytest.mark.parametrize(
    "fields",
    [{}, {"mixed_steps": True}, {"enable_prefix_cache": False, "mixed_steps": True, "schedule_policy": "dfs-weight"}],
    ids=["plain", "mixed", "no_cache"],
)


@MODES
def test_continue_goes_on_with_the_old_kv_and_shares_nothing(fields: dict[str, Any]) -> None:
    busy = Busy(**fields)
    engine = busy.engine
    engine.update_params(NEW)
    engine.check_integrity()
    assert engine.weight_version == 1
    outputs = finish(engine)
    for name in busy.begun:
        for completion in outputs[name].outputs:
            assert len(completion.token_ids) == {busy.group: 25, busy.partial: 5}.get(name, 30)
            num_old = completion.weight_versions.count(0)
            assert completion.weight_versions == [0] * num_old + [1] * (len(completion.token_ids) - num_old)
            assert (num_old > 0) is (name != busy.partial)
    for name in busy.waiting:
        assert outputs[name].outputs[0].weight_versions == [1] * 4
    assert outputs[busy.partial].prompt_logprobs is not None
    busy.check(outputs)
    assert_all_is_of(engine, 1)


@MODES
def test_restart_begins_anew_with_the_new_weights(fields: dict[str, Any]) -> None:
    busy = Busy(**fields)
    engine = busy.engine
    engine.update_params(NEW, on_update="restart")
    engine.check_integrity()
    assert engine.stats().num_running == 0
    outputs = finish(engine)
    for name in (*busy.begun, *busy.waiting):
        for completion in outputs[name].outputs:
            assert completion.weight_versions == [1] * len(completion.token_ids)
            assert completion.finish_reason == "length"
    for name, prompt in zip(busy.decoding, (A, B, C), strict=True):
        assert outputs[name].outputs[0].token_ids == dense_greedy(prompt, 30, NEW)
        assert outputs[name].cached_tokens == 0
    busy.check(outputs)
    told = str(engine.explain(busy.partial))
    assert told.index("new weights: version 1") < told.index("restarted: version 1")
    assert_all_is_of(engine, 1)


@MODES
def test_abort_ends_what_began_and_lets_the_rest_wait(fields: dict[str, Any]) -> None:
    busy = Busy(**fields)
    engine = busy.engine
    engine.update_params(NEW, on_update="abort")
    engine.check_integrity()
    told = {output.request_id: output for output in engine.step()}
    assert told.keys() == set(busy.begun)
    for output in told.values():
        assert output.finished
        for completion in output.outputs:
            assert (completion.finish_reason, completion.stop_reason) == ("abort", "weights updated to version 1")
            assert completion.weight_versions == [0] * len(completion.token_ids)
    outputs = finish(engine)
    assert outputs.keys() == set(busy.waiting)
    busy.check(told | outputs)
    assert_all_is_of(engine, 1)


def test_pages_of_old_weights_go_at_once_and_locked_ones_with_their_last_user() -> None:
    engine = make_engine()
    generate(engine, [A, B], greedy(3))
    first, second = (engine.add_request(C, greedy(length)) for length in (9, 14))
    for _ in range(4):
        engine.step()
    num_used = engine.stats().num_protected_pages
    assert num_used
    assert engine.stats().num_evictable_pages > 0
    engine.update_params(NEW)
    assert namespaces(engine) == {None}
    assert (engine.stats().num_evictable_pages, engine.stats().num_protected_pages) == (0, num_used)
    assert engine.stats().num_evicted_tokens == 0
    while first in engine.unfinished:
        engine.step()
        assert engine.stats().num_evictable_pages == 0
    assert namespaces(engine) == {None}, "the prompt is the other one's too"
    while second in engine.unfinished:
        engine.step()
    assert engine.stats().num_free_pages == 199
    assert namespaces(engine) == set()
    assert_all_is_of(engine, 1)


def test_a_straddler_leaves_no_part_of_a_page() -> None:
    engine = make_engine()
    name = engine.add_request(A[:5], greedy(3))
    engine.step()
    engine.update_params(NEW)
    output = finish(engine)[name]
    assert set(output.outputs[0].weight_versions) == {0, 1}
    assert engine.stats().num_free_pages == 199
    [again] = generate(engine, [A[:5]], greedy(3))
    assert again.cached_tokens == 0
    assert engine.stats().num_free_pages == 197, "of new weights a page and a part of one are kept"


def test_a_straddler_that_comes_back_is_computed_by_the_new_weights_alone() -> None:
    """And shares again: what it computes then serves others."""
    engine = make_engine()
    others = [engine.add_request(prompt, greedy(40)) for prompt in (A, B, C, D, W, LIKE_A, A[:9])]
    straddler = engine.add_request(LONG[:30], greedy(20))
    for _ in range(6):
        engine.step()
    engine.update_params(NEW)
    engine.step()
    engine.add_request(A[:5], greedy(3), priority=1)
    while "retracted" not in [event.kind for event in engine.explain(straddler).events]:
        engine.step()
        engine.check_integrity()
    for name in others:
        engine.abort(name)
    [output] = [output for name, output in finish(engine).items() if name == straddler]
    check_output(engine, output, PARAMS)
    again = np.array([*output.prompt_token_ids, *output.outputs[0].token_ids], np.int32)
    [second] = generate(engine, [again], greedy(3))
    assert second.cached_tokens == 49, "all but the last output, which was never fed back"
    assert second.outputs[0].token_ids == dense_greedy(again, 3, NEW)


def test_scores_of_old_weights_are_not_kept() -> None:
    """Neither beside cached pages, nor by a request that waits and was served from them."""
    engine = make_engine()
    [old] = engine.score([LONG])
    params = greedy(2, prompt_logprobs=0)
    running = [engine.add_request(prompt, greedy(6)) for prompt in (A, B, C, D, W, A[:4], A[:5])]
    scored = engine.add_request(LONG, params)
    engine.step()
    waiting = engine.add_request(LONG, params)
    for _ in range(2):
        engine.step()
    engine.update_params(NEW, on_update="restart")
    outputs = finish(engine)
    [new] = engine.score([LONG])
    for name in (scored, waiting):
        check_output(engine, outputs[name], PARAMS)
        entries = outputs[name].prompt_logprobs
        assert entries is not None
        np.testing.assert_allclose(
            [entry[t].logprob for t, entry in zip(LONG[1:], entries[1:], strict=True)], new, atol=1e-4
        )
    assert np.abs(new - old).max() > 0.1
    assert outputs.keys() == {*running, scored, waiting}


def test_each_token_has_the_version_that_sampled_it() -> None:
    engine = make_engine()
    name = engine.add_request(A, greedy(9))
    seen: list[int] = []
    outputs: list[RequestOutput] = []
    for version in (0, 1, 2):
        for _ in range(3):
            outputs += engine.step()
        seen.append(len(outputs[-1].outputs[0].token_ids))
        if version < 2:
            engine.update_params(PARAMS[version + 1])
    outputs += finish(engine).values()
    last = outputs[-1].outputs[0]
    assert last.weight_versions[: seen[0] + 1] == [0] * (seen[0] + 1), "that of the step in flight is of the old ones"
    assert sorted(last.weight_versions) == last.weight_versions
    assert set(last.weight_versions) == {0, 1, 2}
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == list(range(1, 10)), "each output has one token more"
    for output in outputs:
        versions = output.outputs[0].weight_versions
        assert versions == last.weight_versions[: len(versions)]
    check_output(engine, outputs[-1], PARAMS)
    assert name == outputs[-1].request_id


def test_two_updates_in_a_row_keep_the_newest() -> None:
    engine = make_engine()
    name = engine.add_request(A, greedy(6))
    for _ in range(2):
        engine.step()
    engine.update_params(NEW)
    engine.update_params(NEWEST)
    output = finish(engine)[name]
    assert set(output.outputs[0].weight_versions) == {0, 2}
    check_output(engine, output, PARAMS)
    assert_all_is_of(engine, 2)


def test_streams_are_told_of_an_abort() -> None:
    engine = make_engine()
    running, other = engine.stream(A, greedy(30)), engine.stream(B, drawn(30, SEED, n=4))
    assert [len(next(running).outputs[0].token_ids) for _ in range(3)] == [1, 2, 3]
    next(other)
    engine.update_params(NEW, on_update="abort")
    for stream in (running, other):
        last = list(stream)[-1]
        assert last.finished
        assert {completion.finish_reason for completion in last.outputs} == {"abort"}
    assert engine.has_unfinished(), "step() has yet to tell whoever drives the engine"
    assert all(output.finished for output in engine.step())
    assert not engine.has_unfinished()
    assert_all_is_of(engine, 1)


def test_a_stream_goes_on_with_new_weights_or_from_the_start() -> None:
    engine = make_engine()
    stream = engine.stream(A, greedy(12))
    first = [next(stream) for _ in range(3)]
    engine.update_params(NEW)
    mixed = [*first, *stream]
    assert [len(output.outputs[0].token_ids) for output in mixed] == list(range(1, 13))
    check_output(engine, mixed[-1], PARAMS)

    engine = make_engine()
    stream = engine.stream(A, greedy(12))
    first = [next(stream) for _ in range(3)]
    engine.update_params(NEW, on_update="restart")
    rest = list(stream)
    assert rest[-1].outputs[0].token_ids == dense_greedy(A, 12, NEW)
    assert [len(output.outputs[0].token_ids) for output in rest[-12:]] == list(range(1, 13))


def test_an_abort_after_the_update_gives_the_last_output_once() -> None:
    engine = make_engine()
    one, other = engine.add_request(A, greedy(30)), engine.add_request(B, greedy(30))
    for _ in range(2):
        engine.step()
    engine.update_params(NEW)
    aborted = engine.abort(one)
    assert aborted is not None
    assert aborted.finished
    assert [output.request_id for output in engine.step()] == [other]
    assert one not in finish(engine)
    assert_all_is_of(engine, 1)


def test_what_an_update_ends_is_recorded_once(tmp_path: Path) -> None:
    engine = make_engine(record=str(tmp_path / "record.jsonl"))
    engine.add_request(A, greedy(2))
    aborted = engine.add_request(B, greedy(20), priority=1)
    for _ in range(2):
        engine.step()
    engine.update_params(NEW, on_update="abort")  # of which the step in flight ends the first one
    restarted = engine.add_request(C, greedy(5))
    outputs = {output.request_id: output for output in engine.step()}
    engine.step()
    engine.update_params(NEWEST, on_update="restart")
    outputs |= finish(engine)
    assert outputs[restarted].outputs[0].token_ids == dense_greedy(C, 5, NEWEST)
    assert outputs[aborted].outputs[0].finish_reason == "abort"
    records = [RecordedRequest.from_json(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    recorded = {tuple(record.token_ids.tolist()): record.output_ids.tolist() for record in records}
    assert len(records) == 3
    assert recorded == {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in outputs.values()}


class TellsAll:
    """A check that never ends a sample, and keeps what it was told."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def __call__(self, index: int, new_ids: list[int]) -> FinishAt | None:
        self.ids += new_ids


def test_restart_can_take_nothing_back_from_a_finish_check() -> None:
    engine = make_engine()
    check = TellsAll()
    name = engine.add_request(A, greedy(6), finish_check=check)
    engine.update_params(NEW, on_update="restart")  # nobody was told anything
    for _ in range(3):
        engine.step()
    with pytest.raises(RuntimeError, match=rf"request {name}, and its finish_check can't be untold the \d ids of it"):
        engine.update_params(NEWEST, on_update="restart")
    assert engine.weight_version == 1
    output = finish(engine)[name]
    assert output.outputs[0].token_ids == check.ids == dense_greedy(A, 6, NEW)
    engine.update_params(NEWEST, on_update="restart")


def test_any_other_way_to_go_on_is_refused() -> None:
    engine = make_engine()
    on_update: Any = "stop"
    check = plain_module("scheduler/new_weights").check_on_update
    with pytest.raises(ValueError, match="on_update='stop' is none of 'continue', 'restart', 'abort'"):
        check(on_update)
    assert engine.weight_version == 0


@pytest.mark.parametrize("place", ["read", "replace_params", "retire", "peek"])
def test_an_update_that_is_interrupted_leaves_the_engine_whole(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy()
    engine = busy.engine

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner if place in ("read", "replace_params") else engine.cache, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_params(NEW)
    assert not engine.has_unfinished()
    assert engine.weight_version == 0
    assert_all_is_of(engine, 0)
    engine.update_params(NEW)
    assert_all_is_of(engine, 1)
