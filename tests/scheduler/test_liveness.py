"""Constant overload in virtual time: nobody starves, nothing is retracted again and again, little is computed twice."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler

from radix_jax.plan import StepPlan
from radix_jax.request import Request
from radix_jax.scheduler.policy import max_overtaken_passes

PAGE_SIZE, CHUNK_LEN, MAX_MODEL_LEN = 4, 32, 256
NUM_QUEUED, NUM_ROWS = 20, 16
GENERATION_PASSES = 256  # here; the real ones are many more, and would make these tests long


@pytest.fixture(autouse=True)
def short_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("policy", "waiting"):
        monkeypatch.setattr(f"radix_jax.scheduler.{module}.GENERATION_PASSES", GENERATION_PASSES)


@dataclass
class Observed:
    """num_steps, num_prefill_tokens, num_retractions: of the whole run. For each request, steps from its arrival to its
    end, passes from its arrival to its first admission, and retractions; most_waiting at a time."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_retractions: int = 0
    most_waiting: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    retractions: dict[str, int] = field(default_factory=dict)
    ahead: dict[str, int] = field(default_factory=dict)


def overload(policy: str, requests: Iterator[Request], num_pages: int, *, has_model: bool = True) -> Observed:
    """As soon as fewer than NUM_QUEUED wait, the next one comes; a step takes a unit of time.

    has_model: False samples 0 for ever.
    """
    scheduler = make_scheduler(
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_running_requests=NUM_ROWS,
        max_prefill_tokens=CHUNK_LEN,
        max_model_len=MAX_MODEL_LEN,
        schedule_policy=policy,
    )
    model, seen, came_at = FakeModel(num_pages, PAGE_SIZE), Observed(), {}
    num_passes = 0
    ahead = Ahead(scheduler, model)
    while True:
        while scheduler.num_waiting < NUM_QUEUED and (request := next(requests, None)) is not None:
            seen.ahead[request.request_id] = len(scheduler.states)
            scheduler.add(request)
            came_at[request.request_id] = seen.num_steps, num_passes
        seen.most_waiting = max(seen.most_waiting, scheduler.num_waiting)
        waiting = {request_id for request_id, state in scheduler.states.items() if state.handle is None}
        plan: StepPlan | None = None
        if len(ahead.in_flight) < 2:
            plan = scheduler.plan()
        if plan is not None:
            ahead.in_flight.append((plan, model.run(plan) if has_model else np.zeros(len(plan.rows), np.int32)))
            seen.num_steps += 1
            admitted = waiting & {row.request.request_id for row in plan.rows}
            for request_id in admitted - seen.passes.keys():
                seen.passes[request_id] = num_passes - came_at[request_id][1]
            num_passes += bool(admitted)
        elif not ahead.in_flight:
            break
        if plan is None or len(ahead.in_flight) == 2:
            for state in scheduler.commit(*ahead.in_flight.popleft()):
                if state.finish_reason is not None:
                    assert not has_model or state.output_ids.tolist() == expected_output(state.request)
                    seen.steps[state.request_id] = seen.num_steps - came_at[state.request_id][0]
                    seen.retractions[state.request_id] = state.num_retractions
    scheduler.check_integrity()
    assert seen.steps.keys() == came_at.keys()
    seen.num_prefill_tokens = scheduler.stats.num_prefill_tokens
    seen.num_retractions = scheduler.stats.num_retractions
    return seen


def prompts(rng: np.random.Generator, longest: int) -> Callable[[], np.ndarray]:
    """Two in three share one of six stems."""
    stems = [rng.integers(0, 1000, rng.integers(4, longest // 2)) for _ in range(6)]

    def one() -> np.ndarray:
        own = rng.integers(0, 1000, rng.integers(1, longest // 2))
        return np.concatenate([stems[rng.integers(6)], own]) if rng.integers(3) else own

    return one


def bursts(num_requests: int, *, max_tokens: int, is_reserved: bool, longest: int = 80) -> Iterator[Request]:
    """By turns 100 whose outputs end early, so that less and less is reserved, and 100 with the longest outputs, for
    which it was too little. is_reserved: the same, but reserved in full, so that nothing is ever retracted."""
    make, prompt = RequestMaker(), prompts(np.random.default_rng(1), longest)
    for i in range(num_requests):
        stop_ids = range(0, 50, 8) if i // 100 % 2 == 0 else ()
        yield make(prompt(), max_tokens, stop_ids=stop_ids, ignore_eos=is_reserved)


def test_retractions_cost_less_than_reserving_everything() -> None:
    """In steps; and of prefill tokens not half more are computed."""
    with_retractions, reserved = (
        overload("lpm", bursts(200, max_tokens=100, is_reserved=is_reserved), num_pages=129)
        for is_reserved in (False, True)
    )
    assert with_retractions.num_retractions >= 5
    assert reserved.num_retractions == 0
    assert max(with_retractions.retractions.values()) <= 2
    assert with_retractions.num_steps <= reserved.num_steps
    assert with_retractions.num_prefill_tokens <= 1.5 * reserved.num_prefill_tokens
    assert max(with_retractions.steps.values()) <= 1.1 * max(reserved.steps.values())


def test_first_come_first_served_ends_each_as_if_those_ahead_ran_one_after_the_other() -> None:
    """A bound that holds whatever is retracted: steps of the longest prompt and output, for each of those that were
    there on arrival and for itself."""
    seen = overload("fcfs", bursts(200, max_tokens=60, is_reserved=False), num_pages=65)
    assert seen.num_retractions > 0
    most_steps_of_one = -(-80 // CHUNK_LEN) + 60
    for request_id, num_steps in seen.steps.items():
        assert num_steps <= (seen.ahead[request_id] + 1) * most_steps_of_one


@pytest.mark.parametrize(
    ("policy", "num_overtaken"),
    [
        ("fcfs", 0),
        ("lpm", max_overtaken_passes(MAX_MODEL_LEN)),
        ("dfs-weight", GENERATION_PASSES),
        ("hrrn", GENERATION_PASSES),
        ("lof", GENERATION_PASSES),
    ],
)
def test_everybody_is_admitted_within_a_number_of_passes(policy: str, num_overtaken: int) -> None:
    """After `num_overtaken` passes nobody who comes sorts ahead. Those who are ahead by then wait, or run and may be
    retracted once more; each pass admits one of them at least."""
    rng, make = np.random.default_rng(2), RequestMaker()
    prompt = prompts(rng, 40)
    requests = (make(prompt(), int(rng.integers(2, 20))) for _ in range(600))
    seen = overload(policy, requests, num_pages=49, has_model=False)
    bound = num_overtaken + seen.most_waiting + NUM_ROWS
    assert max(seen.passes.values()) <= bound
    assert max(seen.retractions.values()) <= 2
    if policy == "lof":
        assert max(seen.passes.values()) > GENERATION_PASSES // 2
