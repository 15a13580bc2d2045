"""`Engine.explain`: why a request waits or waited, for everything that an engine does to one."""

import time

import pytest
from tiny import SMALL, finish, greedy, random_prompts, tiny_engine, tiny_llama
from tiny_llm import tiny_llm

from radix_jax import Engine, EngineConfig


def kinds(engine: Engine, request_id: str) -> list[str]:
    return [event.kind for event in engine.explain(request_id).events]


def test_before_during_and_after() -> None:
    engine = tiny_engine()
    prompt = random_prompts(1, lens=(70, 71))[0]
    began_s = time.monotonic()
    request_id = engine.add_request(prompt, greedy(3))
    waiting = engine.explain(request_id)
    assert (waiting.status, [event.kind for event in waiting.events]) == ("waiting", ["queued"])
    assert waiting.standing is not None
    assert waiting.standing.num_ahead == 0
    engine.step()
    assert engine.explain(request_id).status == "running"
    finish(engine)
    ended = engine.explain(request_id)
    assert (ended.status, ended.standing, ended.num_pages) == ("ended", None, 0)
    # 64 tokens a step.
    assert kinds(engine, request_id) == ["queued", "admitted", "chunk", "chunk", "first token", "ended"]
    times_s = [event.now_s for event in ended.events]
    assert times_s == sorted(times_s)
    assert began_s <= times_s[0]
    assert times_s[-1] <= time.monotonic()
    first_token, last = ended.events[-2:]
    assert last.step == first_token.step + 2
    assert last.detail == "length"
    assert str(ended).startswith(f"request {request_id}: ended")


def test_aborts() -> None:
    engine = tiny_engine()
    running = engine.add_request([1, 2, 3], greedy(30))
    engine.step()
    waiting = engine.add_request([4, 5, 6], greedy(30))
    engine.abort(waiting)
    engine.abort(running)
    assert kinds(engine, waiting) == ["queued", "ended"]
    assert kinds(engine, running)[-2:] == ["first token", "ended"]


def test_an_interrupted_step_is_told_and_earlier_requests_stay_known(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_llama(), None, EngineConfig(**SMALL))
    earlier = engine.add_request([1, 2, 3], greedy(2))
    finish(engine)
    dropped = engine.add_request([4, 5, 6], greedy(30))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.explain(dropped).events[-1].detail == "dropped: a step did not finish"
    assert kinds(engine, earlier)[-1] == "ended"
    step = engine.explain(dropped).events[-1].step
    after = engine.add_request([7, 8], greedy(1))
    finish(engine)
    assert [event.step for event in engine.explain(after).events][1] > step - 1, "steps are counted on"
    engine.close()
    assert kinds(engine, earlier)[-1] == "ended"


def test_an_unknown_request() -> None:
    with pytest.raises(KeyError, match="nothing is known of request 'x'"):
        tiny_engine().explain("x")


def test_of_an_llm() -> None:
    llm = tiny_llm()
    [output] = llm.generate(["the sea"], greedy(2), use_tqdm=False)
    assert "computes tokens [0, 7)" in str(llm.engine.explain(output.request_id))
