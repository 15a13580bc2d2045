"""Longest-prefix-first order must not starve cold requests: one hot arrival a step, capacity for one, for ever."""

import numpy as np
import pytest
from scheduling import FakeModel, RequestMaker, make_scheduler

from radix_jax.scheduler.policy import AGING_CREDIT, max_overtaken_passes

GENERATION_PASSES = 256  # here; the real ones are many more, and would make these tests long


@pytest.fixture(autouse=True)
def short_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("policy", "waiting"):
        monkeypatch.setattr(f"radix_jax.scheduler.{module}.GENERATION_PASSES", GENERATION_PASSES)


PAGE_SIZE = 16
HIT_LEN = 100 * PAGE_SIZE
MAX_MODEL_LEN = HIT_LEN + 100


def waits_of_cold_requests(policy: str, *, num_steps: int, cold_every: int) -> list[int]:
    """Steps that each cold request waited, in the order in which they ran; all of them did."""
    rng = np.random.default_rng(0)
    num_pages = 200
    scheduler = make_scheduler(
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_model_len=MAX_MODEL_LEN,
        max_running_requests=1,
        schedule_policy=policy,
    )
    model, make = FakeModel(num_pages, PAGE_SIZE), RequestMaker()
    stem = rng.integers(0, 1000, HIT_LEN, np.int32)
    scheduler.add(make(stem, 1))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, model.run(plan))

    came: dict[str, int] = {}
    waits: list[int] = []
    for now in range(num_steps):
        if now % cold_every == 0:
            cold = make(rng.integers(1000, 2000, 40, np.int32), 1, request_id=f"cold{now}")
            came[cold.request_id] = now
            scheduler.add(cold)
        scheduler.add(make(np.append(stem, now), 1))
        plan = scheduler.plan()
        assert plan is not None
        [row] = plan.rows
        if row.request.request_id in came:
            waits.append(now - came.pop(row.request.request_id))
        else:
            assert row.start == HIT_LEN
        scheduler.commit(plan, np.zeros(1, np.int32))
    scheduler.check_integrity()
    assert not came
    assert len(waits) == -(-num_steps // cold_every)
    return waits


@pytest.mark.slow
def test_cold_requests_run_within_the_bound_while_hot_ones_keep_coming() -> None:
    waits = waits_of_cold_requests("lpm", num_steps=10_000, cold_every=991)
    # The first one has nobody behind it in line; each step is a pass that admits a hot one instead.
    assert waits[0] == HIT_LEN // AGING_CREDIT
    # The cold ones that ran left a queue of hot ones of their number, which come first too.
    assert max(waits) <= max_overtaken_passes(MAX_MODEL_LEN) + len(waits)


@pytest.mark.parametrize("policy", ["dfs-weight", "hrrn", "shortest-prefill-first", "random", "fcfs"])
def test_no_other_policy_lets_them_wait_longer_than_a_generation(policy: str) -> None:
    waits = waits_of_cold_requests(policy, num_steps=2 * GENERATION_PASSES + 60, cold_every=150)
    assert max(waits) <= GENERATION_PASSES + len(waits)
    if policy == "dfs-weight":
        # Nothing but the generation ends the wait here: a cold request always comes after the whole tree.
        assert waits[0] >= GENERATION_PASSES - 2
