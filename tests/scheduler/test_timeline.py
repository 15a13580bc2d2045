"""What is noted of each request, and what `explain` makes of it."""

from collections.abc import Callable
from typing import Any

import pytest
from scheduling import Ahead, FakeModel, RequestMaker, make_scheduler, run_all, step

from radix_jax.cache.evicted import EvictedSpan
from radix_jax.plan import StepPlan
from radix_jax.scheduler import Explanation, RequestState, Scheduler, Timelines
from radix_jax.scheduler.timeline import MAX_ENDED, MAX_EVENTS, MAX_SPANS, Budget, Entry, Hold


class Clock:
    """Drives a scheduler: a plan each second, and its commit half a second later."""

    def __init__(self, **fields: Any) -> None:
        self.num_pages = fields.setdefault("num_pages", 65)
        fields.setdefault("page_size", 4)
        self.scheduler: Scheduler = make_scheduler(**fields)
        self.make = RequestMaker()
        self._model = FakeModel(self.num_pages, fields["page_size"])
        self.now_s = 0.0

    def add(self, ids: Any, max_tokens: int = 4, **fields: Any) -> RequestState:
        return self.scheduler.add(self.make(ids, max_tokens, **({"ignore_eos": True} | fields)), self.now_s)

    def step(self, num_steps: int = 1) -> StepPlan | None:
        plan = None
        for _ in range(num_steps):
            self.now_s += 1.0
            plan = self.scheduler.plan(self.now_s)
            if plan is not None:
                self.scheduler.commit(plan, self._model.run(plan), self.now_s + 0.5)
            self.scheduler.check_integrity()
        return plan

    def explain(self, request_id: str) -> Explanation:
        return self.scheduler.explain(request_id)

    def told(self, request_id: str) -> list[tuple[float, int, str]]:
        return [event[:3] for event in self.explain(request_id).events]


def spans(explanation: Explanation, kind: str) -> list[tuple[int, int]]:
    return [(event.start, event.end) for event in explanation.events if event.kind == kind]


def holds(explanation: Explanation) -> list[Hold]:
    return [event.detail for event in explanation.events if isinstance(event.detail, Hold)]


# ---- events


def test_a_life_in_one_chunk() -> None:
    clock = Clock()
    clock.now_s = 10.0
    clock.add(range(9))
    clock.step(4)
    assert clock.told("r0") == [
        (10.0, 0, "queued"),
        (11.0, 1, "admitted"),
        (11.0, 1, "chunk"),
        (11.5, 1, "first token"),
        (14.5, 4, "ended"),
    ]
    explanation = clock.explain("r0")
    assert explanation.status == "ended"
    assert explanation.events[-1].detail == "length"
    assert explanation.events[1].detail == Entry(Budget(3, 0, 64), 0, (0,))
    assert explanation.waits_s == {"queue": 1.0}


def test_a_decode_step_notes_nothing() -> None:
    clock = Clock()
    clock.add(range(9), 40)
    clock.step()
    events = clock.explain("r0").events
    clock.step(30)
    assert clock.explain("r0").events == events


def test_chunks_and_what_the_cache_had() -> None:
    clock = Clock(max_prefill_tokens=8, partial_pages=False)
    clock.add(range(20), 1)
    clock.step(3)
    assert spans(clock.explain("r0"), "chunk") == [(0, 8), (8, 16), (16, 20)]
    assert (3.5, 3, "first token") in clock.told("r0")
    clock.add(range(30), 1)
    clock.step(2)
    again = clock.explain("r1")
    assert spans(again, "admitted") == [(0, 20)]
    assert spans(again, "chunk") == [(20, 28), (28, 30)]


def test_a_token_belongs_to_the_step_that_sampled_it_though_the_next_is_planned() -> None:
    scheduler = make_scheduler(page_size=4)
    ahead = Ahead(scheduler, FakeModel(257, 4))
    scheduler.add(RequestMaker()(range(6), 3))
    ahead.plan(1.0)
    ahead.plan(2.0)
    ahead.commit()
    assert [event.step for event in scheduler.explain("r0").events] == [0, 1, 1, 1]
    ahead.run_all()
    assert [event.step for event in scheduler.explain("r0").events][-1] == 3


def test_retracted_and_admitted_again() -> None:
    # Both fill 8 pages of 15. The second is let in, as only a share of the first one's output is reserved.
    clock = Clock(num_pages=16, partial_pages=False)
    clock.add(range(10), 20, ignore_eos=False)
    clock.add(range(100, 110), 20, ignore_eos=False)
    while clock.step() is not None:
        pass
    stats = clock.scheduler.stats
    assert stats.num_retractions > 0
    told = [clock.explain(request_id) for request_id in ("r0", "r1")]
    kinds = [[event.kind for event in each.events] for each in told]
    assert sum(each.count("retracted") for each in kinds) == stats.num_retractions
    for each, explanation in zip(kinds, told, strict=True):
        assert each.count("admitted") == each.count("retracted") + 1
        assert each.count("first token") == each.count("ended") == 1
        assert all(event.detail is None for event in explanation.events if event.kind == "retracted")
        times = [(event.step, event.now_s) for event in explanation.events]
        assert times == sorted(times)


def test_who_gave_way_to_whom() -> None:
    clock = Clock(num_pages=9)
    clock.add(range(10), 10)
    clock.step()
    clock.add(range(100, 120), 10, priority=1)
    clock.step()
    assert [event.detail for event in clock.explain("r0").events if event.kind == "retracted"] == ["r1"]
    assert clock.explain("r0").status == "waiting"
    assert "retracted for request r1" in str(clock.explain("r0"))


@pytest.mark.parametrize("runs", [False, True])
def test_aborted(runs: bool) -> None:
    clock = Clock()
    clock.add(range(9))
    if runs:
        clock.step()
    clock.scheduler.abort("r0", 7.0)
    last = clock.explain("r0").events[-1]
    assert last[:3] == (7.0, int(runs), "ended")
    assert last.detail == "abort"


def test_timed_out() -> None:
    clock = Clock(limits={"queue_timeout_s": 5.0})
    clock.add(range(9))
    [state] = clock.scheduler.expire(6.0)
    last = clock.explain("r0").events[-1]
    assert (last.now_s, last.detail) == (6.0, "queue_timeout_s=5.0")
    assert state.stop_reason == last.detail


def test_dropped() -> None:
    clock = Clock()
    clock.add(range(9))
    clock.step()
    clock.add(range(9))
    clock.scheduler.reset()
    assert [clock.explain(request_id).events[-1].detail for request_id in ("r0", "r1")] == ["dropped"] * 2


# ---- why one waits


def test_a_row() -> None:
    clock = Clock(max_running_requests=1)
    clock.add(range(9), 10)
    clock.add(range(50, 60), 10)
    clock.step(3)
    explanation = clock.explain("r1")
    assert explanation.hold == Hold("row")
    assert holds(explanation) == [Hold("row")], "once, however many passes it lasts"
    assert explanation.status == "waiting"
    assert "waits for a row" in str(explanation)
    clock.step(8)  # r0 ends with step 10
    assert clock.explain("r1").status == "running"
    assert clock.explain("r1").waits_s == {"queue": 1.0, "row": 10.0}


def test_pages_with_the_numbers() -> None:
    clock = Clock(num_pages=9, limits={"preemption_threshold": None})
    clock.add(range(10), 20)
    clock.add(range(50, 70), 13)
    clock.step()
    explanation = clock.explain("r1")
    # 20 + 12 tokens fill 8 pages, which is all there are; r0 has 3, and asks for 5 more.
    assert explanation.hold == Hold("pages", Budget(num_needed=8, num_reserved=5, num_available=5))
    assert explanation.budget == explanation.hold.budget
    assert "waits for pages: 8 needed, 5 kept for running requests, 5 available" in str(explanation)
    clock.step(4)
    assert clock.explain("r1").hold == explanation.hold, "as of the last pass: nothing changed since"
    assert clock.explain("r1").budget == Budget(8, 4, 4)


def test_the_tokens_of_the_step() -> None:
    clock = Clock(max_prefill_tokens=10)
    clock.add(range(8), 5)
    clock.add(range(50, 58), 5)
    clock.step()
    assert clock.explain("r1").hold == Hold("tokens")
    clock.step()
    assert clock.explain("r1").status == "running"


def test_a_prefix_that_another_one_computes() -> None:
    clock = Clock(max_prefill_tokens=11)
    clock.add(range(20), 5)
    clock.add([*range(16), 99], 5)
    clock.add([70, 71], 5)
    clock.step()
    # The chunk ends with a page, so that the step has tokens left: r1 is passed over, and r2 let in.
    assert spans(clock.explain("r0"), "chunk") == [(0, 8)]
    explanation = clock.explain("r1")
    assert explanation.hold == Hold("prefix", other="r0")
    assert clock.explain("r2").status == "running"
    assert "waits for its prefix, which a later chunk of request r0 computes" in str(explanation)
    clock.step()
    assert clock.explain("r1").status == "running"
    assert clock.explain("r1").waits_s == {"queue": 1.0, "prefix": 1.0}


def test_the_queue_in_front() -> None:
    clock = Clock(max_running_requests=1)
    clock.add(range(9), 10)
    clock.add(range(50, 60), 10)
    clock.add(range(70, 75), 10)
    before = clock.explain("r2")
    assert (before.hold, before.blocker) == (None, None)
    assert "the next step that lets requests in" in str(before)
    clock.step(2)
    explanation = clock.explain("r2")
    assert (explanation.hold, explanation.blocker) == (None, ("r1", Hold("row")))
    assert explanation.standing is not None
    assert (explanation.standing.num_ahead, explanation.policy, explanation.priority) == (1, "lpm", 0)
    assert "place 2 in the queue by lpm: priority 0, generation 0, key 0" in str(explanation)
    assert "the queue: request r1 goes first, and waits for a row" in str(explanation)
    clock.add([1], priority=5)
    assert clock.explain("r3").blocker is None, "it goes first"
    clock.scheduler.abort("r1")
    assert clock.explain("r2").blocker is None


def test_a_pass_forgets_the_one_before() -> None:
    clock = Clock(max_running_requests=1)
    clock.add(range(9), 3)
    clock.add(range(50, 60), 10)
    clock.step(2)
    assert clock.explain("r1").hold == Hold("row")
    clock.add(range(20, 40), 10, priority=1)
    clock.step(2)
    assert clock.explain("r2").status == "running"
    clock.add(range(60, 80), 10, priority=1)
    clock.step()
    assert clock.explain("r1").hold is None
    assert clock.explain("r1").blocker == ("r3", Hold("row"))


def test_who_waits_for_a_prefix_blocks_nobody() -> None:
    clock = Clock(max_prefill_tokens=11)
    clock.add(range(20), 5)
    clock.add([*range(16), 99], 5)
    clock.add([70, 71, 72], 5)
    clock.add([80, 81], 5)
    clock.step()
    assert clock.explain("r1").hold == Hold("prefix", other="r0")
    explanation = clock.explain("r3")
    assert (explanation.status, explanation.hold, explanation.blocker) == ("waiting", None, None)


def test_a_step_in_flight() -> None:
    scheduler, make = make_scheduler(page_size=4, max_running_requests=1), RequestMaker()
    ahead = Ahead(scheduler, FakeModel(257, 4))
    scheduler.add(make(range(10), 10))
    ahead.plan()
    scheduler.add(make(range(20, 30), 10, priority=1))
    assert ahead.plan() is None
    assert scheduler.explain("r1").hold == Hold("commit")
    ahead.commit()
    ahead.plan()
    assert scheduler.explain("r1").status == "running"


def test_explaining_changes_nothing() -> None:
    def order(explains: bool) -> list[list[str]]:
        clock = Clock(num_pages=20, max_running_requests=3, schedule_policy="dfs-weight", max_prefill_tokens=16)
        for i in range(12):
            clock.add([*range(i % 3 * 50, i % 3 * 50 + 9), i], 3 + i % 4)
        plans = []
        while (plan := clock.step()) is not None:
            plans.append([row.request.request_id for row in plan.rows])
            for request_id in list(clock.scheduler.states) if explains else ():
                str(clock.explain(request_id))
        return plans

    assert order(explains=True) == order(explains=False)


# ---- evictions


def test_what_was_evicted_for_it() -> None:
    clock = Clock(num_pages=9, partial_pages=False)
    clock.add(range(16), 1, namespace="a")
    clock.step()
    clock.add([*range(8), *range(40, 48)], 1, namespace="a")
    clock.step()
    assert clock.explain("r1").num_evicted_pages == 0
    # 4 pages in common, 2 of each: [0, 8), [8, 16) and [8, 16). 5 are wanted, 2 are free.
    clock.add(range(100, 120), 1)
    clock.step()
    explanation = clock.explain("r2")
    assert explanation.num_evicted_pages == clock.scheduler.cache.num_evicted_pages == 3
    assert explanation.evicted == (EvictedSpan("a", 8, 16), EvictedSpan("a", 12, 16))
    assert "cached pages given up for it: 3, among them tokens [8, 16) of namespace 'a'" in str(explanation)


def test_evictions_are_told_to_those_they_are_for() -> None:
    scheduler, make = make_scheduler(page_size=4, num_pages=30), RequestMaker()
    for i in range(30):
        scheduler.add(make([i, *range(2 + i)], 5))
    finished = run_all(scheduler, FakeModel(30, 4))
    told = [scheduler.explain(request_id) for request_id in finished]
    assert sum(each.num_evicted_pages for each in told) == scheduler.cache.num_evicted_pages > 0
    assert all(len(each.evicted) <= MAX_SPANS for each in told)


# ---- bounds


def test_of_those_that_ended_the_last_are_remembered() -> None:
    timelines = Timelines()
    for i in range(MAX_ENDED + 2):
        timelines.begin(str(i), 0)
        timelines.end(str(i), "length")
    assert [event.kind for event in timelines.find("2").events] == ["queued", "ended"]
    for request_id in ("0", "1", "never"):
        with pytest.raises(KeyError, match="nothing is known of request"):
            timelines.find(request_id)


def test_the_same_reason_after_a_retraction_is_news() -> None:
    timelines = Timelines()
    timelines.begin("a", 0)
    timelines.hold("a", Hold("row"))
    timelines.admit("a", Entry(Budget(1, 0, 1), 0, (0,)), 0)
    timelines.note("a", "retracted")
    timelines.hold("a", Hold("row"))
    assert [event.kind for event in timelines.find("a").events] == ["queued", "held", "admitted", "retracted", "held"]


def test_an_id_that_ends_again_is_remembered_from_then_on() -> None:
    timelines = Timelines()
    for request_id in ("a", *map(str, range(MAX_ENDED - 1)), "a", "last"):
        timelines.begin(request_id, 0)
        timelines.end(request_id, "length")
    assert timelines.find("a").events[-1].detail == "length"
    with pytest.raises(KeyError):
        timelines.find("0")


def test_an_id_that_comes_again_is_the_newer_one() -> None:
    timelines = Timelines()
    timelines.begin("a", 0)
    timelines.end("a", "length")
    timelines.begin("a", 3)
    assert [event.kind for event in timelines.find("a").events] == ["queued"]
    timelines.end("a", "stop")
    assert timelines.find("a").events[-1].detail == "stop"


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    clock = Clock(page_size=1, num_pages=2 * MAX_EVENTS + 2, max_prefill_tokens=1, max_model_len=2 * MAX_EVENTS)
    prompt_len = MAX_EVENTS + 50
    clock.add([i % 50 for i in range(prompt_len)], 1)
    clock.step(prompt_len)
    explanation = clock.explain("r0")
    assert len(explanation.events) == MAX_EVENTS
    assert explanation.num_left_out == prompt_len + 4 - MAX_EVENTS
    chunks = spans(explanation, "chunk")
    assert (chunks[0], chunks[-1]) == ((0, 1), (prompt_len - 1, prompt_len))
    assert [event.kind for event in explanation.events[:2]] == ["queued", "admitted"]
    assert explanation.events[-1].kind == "ended"
    lines = str(explanation).splitlines()
    assert len(lines) < 60
    assert any(f"{prompt_len + 4 - 40} more" in line for line in lines)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", lambda view: (view.arrival, 0.5)])
def test_the_key_is_that_of_the_policy(policy: str | Callable[..., Any]) -> None:
    scheduler, make = make_scheduler(page_size=4, schedule_policy=policy, max_running_requests=1), RequestMaker()
    model = FakeModel(257, 4)
    scheduler.add(make(range(9)))
    step(scheduler, model)
    scheduler.add(make([*range(8), 70]))
    # One pass came before it, for which lpm takes as much as 32 tokens in the cache give.
    expected = {"lpm": (32 - 8,), "dfs-weight": (0,)}[policy] if isinstance(policy, str) else (1, 0.5)
    explanation = scheduler.explain("r1")
    assert explanation.standing is not None
    assert explanation.standing.key == expected
    run_all(scheduler, model)
    admitted = next(event for event in scheduler.explain("r1").events if event.kind == "admitted")
    assert isinstance(admitted.detail, Entry)
    assert admitted.detail.key[-1] == expected[-1]
