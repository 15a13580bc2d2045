"""The next step is planned and sent before the tokens of the last one are read: by the order of events."""

import threading

import numpy as np
import pytest
from tiny import dense_greedy, finish, greedy, tiny_engine

from radix_jax import Engine
from radix_jax.plan import StepPlan
from radix_jax.runner import StepHandle


class HeldDevice:
    """Stands between engine and runner: step n is ready only once step n + 1 was sent, save for the last one.

    So an engine that reads before it sends would wait for ever.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, num_steps: int):
        self.events: list[str] = []
        self._num_steps = num_steps
        self._sent: list[threading.Event] = [threading.Event() for _ in range(num_steps + 1)]
        self._sent[num_steps].set()  # nothing follows the last one
        self._handles: list[StepHandle] = []
        self._dispatch, self._read = engine.runner.dispatch, engine.runner.read
        monkeypatch.setattr(engine.runner, "dispatch", self.dispatch)
        monkeypatch.setattr(engine.runner, "read", self.read)

    def dispatch(self, plan: StepPlan) -> StepHandle:
        number = len(self._handles)
        self.events.append(f"send {number}")
        self._sent[number].set()
        self._handles.append(self._dispatch(plan))
        return self._handles[-1]

    def read(self, handle: StepHandle) -> np.ndarray:
        number = next(place for place, sent in enumerate(self._handles) if sent is handle)
        assert self._sent[number + 1].wait(timeout=0), f"step {number} is read before the next one was sent"
        self.events.append(f"read {number}")
        return self._read(handle)


def test_each_step_is_sent_before_the_one_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    engine.flush_cache()
    # Two chunks of a prompt, of which the second samples, and four tokens more.
    device = HeldDevice(engine, monkeypatch, num_steps=6)
    prompt = np.arange(100)
    request_id = engine.add_request(prompt, greedy(5))
    assert finish(engine)[request_id].outputs[0].token_ids == dense_greedy(prompt, 5)
    assert device.events == [
        "send 0", "send 1", "read 0", "send 2", "read 1", "send 3", "read 2", "send 4", "read 3", "send 5", "read 4",
        "read 5",
    ]  # fmt: skip


def test_an_end_that_shows_late_costs_one_step_that_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    engine.flush_cache()
    prompt = np.arange(30)
    expected = dense_greedy(prompt, 3)
    device = HeldDevice(engine, monkeypatch, num_steps=4)
    request_id = engine.add_request(prompt, greedy(20, stop_token_ids=[expected[2]]))
    [output] = [output for output in finish(engine).values() if output.request_id == request_id]
    assert output.outputs[0].token_ids == expected
    assert [event for event in device.events if event.startswith("send")] == ["send 0", "send 1", "send 2", "send 3"]
    assert device.events[-1] == "read 2"
    # Its page went back at once, and what comes next is not disturbed by what was written in vain.
    engine.check_integrity()
    again = engine.add_request(prompt, greedy(6))
    monkeypatch.undo()
    assert finish(engine)[again].outputs[0].token_ids == dense_greedy(prompt, 6)


def test_without_overlap_a_step_is_read_before_the_next_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(overlap=False)
    HeldDevice(engine, monkeypatch, num_steps=3)
    engine.add_request([1, 2, 3], greedy(3))
    with pytest.raises(AssertionError, match="step 0 is read before the next one was sent"):
        finish(engine)


def test_rows_of_both_plans_end_by_abort() -> None:
    engine = tiny_engine()
    ids = [engine.add_request(np.arange(n, n + 20), greedy(30)) for n in (0, 100, 200)]
    for _ in range(3):
        engine.step()
    for request_id in ids:
        engine.abort(request_id)
        engine.check_integrity()
    assert not engine.has_unfinished()
    engine.flush_cache()
    last = engine.add_request(np.arange(9), greedy(4))
    assert finish(engine)[last].outputs[0].token_ids == dense_greedy(np.arange(9), 4)
