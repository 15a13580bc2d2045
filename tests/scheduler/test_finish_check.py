"""A request's own check ends it as a stop id would: at its token, whatever was planned or sampled beyond."""

import logging

import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, samples_of

from radix_jax.request import FinishAt, FinishCheck
from radix_jax.scheduler import RequestState, Scheduler


class Seen:
    """A check that ends sample `index` of a request after `num_ids` ids, and keeps what it was told."""

    def __init__(self, num_ids: int | None, index: int = 0, reason: int | str = "enough"):
        self.ids: dict[int, list[int]] = {}
        self.sizes: list[int] = []
        self._index, self._num_ids, self._reason = index, num_ids, reason

    def __call__(self, index: int, new_ids: list[int]) -> FinishAt | None:
        ids = self.ids.setdefault(index, [])
        num_before = len(ids)
        ids += new_ids
        self.sizes.append(len(new_ids))
        new_ids.clear()  # they are the check's own
        if index != self._index or self._num_ids is None or len(ids) < self._num_ids:
            return None
        return FinishAt(self._num_ids - num_before, self._reason)


def start(page_size: int = 1, num_pages: int = 257, **fields) -> tuple[Scheduler, Ahead, RequestMaker]:
    scheduler = make_scheduler(page_size=page_size, num_pages=num_pages, **fields)
    return scheduler, Ahead(scheduler, FakeModel(num_pages, page_size)), RequestMaker()


def end_of(state: RequestState) -> tuple[str | None, int | str | None, list[int]]:
    return state.finish_reason, state.stop_reason, state.output_ids.tolist()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_ids", [1, 2, 3, 4, 5, 6])
def test_the_step_in_flight_is_dropped_and_its_page_given_back_at_once(page_size: int, num_ids: int) -> None:
    scheduler, ahead, make = start(page_size, partial_pages=False)
    plain, check = make([1, 2, 3], 30), Seen(num_ids)
    full = expected_output(plain)[:num_ids]
    scheduler.add(make([1, 2, 3], 30, finish_check=check, request_id="checked"))
    other = scheduler.add(make([7, 8], 30))
    ahead.plan()
    changed = []
    for _ in range(num_ids):
        ahead.plan()
        changed = ahead.commit()
    [ended] = [state for state in changed if state.request_id == "checked"]
    assert end_of(ended) == ("stop", "enough", full)
    assert check.ids == {0: full}
    assert scheduler.states.keys() == {"r2"}
    assert scheduler.cache.match_len([1, 2, 3, *full, 0]) == (2 + num_ids) // page_size * page_size
    assert scheduler.cache.num_available == 256 - other.num_pages
    assert ahead.run_all()["r2"].output_ids.tolist() == expected_output(other.request)
    assert scheduler.stats.num_output_tokens == num_ids + 30


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("num_ids", [1, 2, 3, 5, 8, 9, 10])
def test_later_tokens_of_a_plan_of_several_steps_are_dropped(page_size: int, num_ids: int) -> None:
    """One token in the first plan, eight in the second one."""
    scheduler, ahead, make = start(page_size)
    check = Seen(num_ids)
    request = make([1, 2, 3], 30, finish_check=check, request_id="checked")
    full = expected_output(make([1, 2, 3], 30))
    state, other = scheduler.add(request), scheduler.add(make([7, 8], 30))
    ahead.plan()
    ahead.commit()
    if num_ids > 1:
        plan = ahead.plan(max_steps=8)
        assert plan is not None
        assert plan.num_steps == 8
        ahead.commit()
    if num_ids > 9:
        ahead.plan()
        ahead.commit()
    assert end_of(state) == ("stop", "enough", full[:num_ids])
    assert check.sizes == [1, 8, 1][: len(check.sizes)]
    assert scheduler.states.keys() == {other.request_id}
    assert scheduler.cache.num_available == 256 - other.num_pages
    ahead.run_all()
    assert other.output_ids.tolist() == expected_output(other.request)
    # What is left of it in the cache is right.
    again = scheduler.add(make([1, 2, 3, *full[:num_ids]], 12))
    ahead.run_all()
    assert again.output_ids.tolist() == full[num_ids : num_ids + 12]


def test_at_the_same_token_a_stop_id_comes_first_and_the_length_last() -> None:
    full = expected_output(RequestMaker()([1, 2, 3], 30))
    assert full.index(full[3]) == 3
    for stop_at, check_at, max_tokens, expected in (
        (4, 4, 30, full[3]),
        (4, 3, 30, "enough"),
        (4, 5, 30, full[3]),
        (4, 4, 4, full[3]),
        (9, 4, 4, "enough"),
        (9, 5, 4, None),
    ):
        scheduler, ahead, make = start()
        stop_id = full[stop_at - 1]
        state = scheduler.add(make([1, 2, 3], max_tokens, stop_ids=[stop_id], finish_check=Seen(check_at)))
        ahead.plan()
        ahead.commit()
        ahead.plan(max_steps=8)
        ahead.run_all()
        num_ids = min(stop_at, check_at, max_tokens)
        assert end_of(state) == ("length" if expected is None else "stop", expected, full[:num_ids])


def raises(index: int, new_ids: list[int]) -> FinishAt | None:
    if index == 1:
        raise ZeroDivisionError("of sample 1")
    return None


def gives(finish: object) -> FinishCheck:
    return lambda index, new_ids: finish if index == 1 else None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (raises, "ZeroDivisionError: of sample 1"),
        (gives(FinishAt(0, "x")), "FinishAt(num_ids=0, stop_reason='x') for 1 new ids; give FinishAt(1..1, reason)"),
        (gives(FinishAt(2, "x")), "FinishAt(num_ids=2, stop_reason='x') for 1 new ids; give FinishAt(1..1, reason)"),
        (gives(True), "ValueError: True for 1 new ids; give FinishAt"),
        (gives((1, "x")), "(1, 'x') for 1 new ids; give FinishAt"),
    ],
)
def test_what_it_raises_ends_that_sample_alone(
    check: FinishCheck, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, ahead, make = start(4)
    request = make([1, 2, 3, 4, 5], 9, finish_check=check)
    full = expected_output(make([1, 2, 3, 4, 5], 9))
    states = scheduler.add_samples(samples_of(request, 3))
    other = scheduler.add(make([7, 8], 9))
    with caplog.at_level(logging.ERROR, logger="radix_jax"):
        ahead.run_all()
    failed = states[1]
    assert (failed.finish_reason, failed.num_outputs) == ("abort", 1)
    assert str(failed.stop_reason).startswith("finish_check: ")
    assert reason in str(failed.stop_reason)
    assert f"the finish_check of request {failed.request_id} failed" in caplog.text
    assert states[0].output_ids.tolist() == full
    assert [state.finish_reason for state in (states[0], states[2], other)] == ["length"] * 3
    assert other.output_ids.tolist() == expected_output(other.request)
    assert (scheduler.stats.num_aborted, scheduler.stats.num_finished) == (1, 3)
    assert str(scheduler.explain(failed.request_id).events[-1].detail) == failed.stop_reason
    assert scheduler.cache.num_available == 256


def test_each_id_is_told_once_though_a_request_is_retracted() -> None:
    """Long outputs in a pool that can't hold them all."""
    scheduler, ahead, make = start(num_pages=301)
    lens = [None, 48, 49, None, None, 49, None, 30, None]
    checks = [Seen(num_ids) for num_ids in lens]
    states = [scheduler.add(make([i, 1], 50, finish_check=check)) for i, check in enumerate(checks)]
    full = [expected_output(make([i, 1], 50)) for i in range(len(lens))]
    ahead.run_all()
    assert sum(state.num_retractions for state in states) > 0
    assert [check.ids[0] for check in checks] == [ids[:num_ids] for ids, num_ids in zip(full, lens, strict=True)]
    assert [state.stop_reason for state in states] == [None if n is None else "enough" for n in lens]


def test_samples_end_each_by_itself() -> None:
    scheduler, ahead, make = start(4)
    check = Seen(3, index=2)
    states = scheduler.add_samples(samples_of(make([1, 2, 3, 4, 5], 9, finish_check=check), 4))
    ahead.run_all()
    assert [state.num_outputs for state in states] == [9, 9, 3, 9]
    assert [state.finish_reason for state in states] == ["length", "length", "stop", "length"]
    assert check.ids == {state.request.sample_index: state.output_ids.tolist() for state in states}
    assert len({tuple(ids) for ids in check.ids.values()}) == 4
