"""The exact order of each policy, ties included, and how long aging lets anybody wait."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from radix_jax.config import SCHEDULE_POLICIES
from radix_jax.scheduler.policy import (
    AGING_CREDIT,
    GENERATION_PASSES,
    QueueView,
    Rule,
    fcfs,
    hrrn,
    lof,
    lpm,
    make_policy,
    max_overtaken_passes,
    random_order,
    routing_key,
    shortest_prefill_first,
)

NOW = 5_000


def view(arrival: int, *, prompt: int = 100, output: int = 10, matched: int = 0, passes: int = 0) -> QueueView:
    return QueueView(
        prompt_len=prompt,
        max_tokens=output,
        matched_len=matched,
        arrival=arrival,
        joined_pass=NOW - passes,
        num_passes=NOW,
    )


def order(rule: Rule, views: list[QueueView]) -> list[int]:
    """Arrivals in the order of a rule, as the queue sorts: equal keys by arrival."""
    return [each.arrival for each in sorted(views, key=lambda each: (rule(each), each.arrival))]


def test_fcfs_is_the_order_of_arrival_whatever_else() -> None:
    views = [view(3, matched=99), view(1), view(2, prompt=5, passes=9)]
    assert order(fcfs, views) == [1, 2, 3]


def test_lpm_takes_the_longest_match_first_and_ties_by_arrival() -> None:
    views = [view(4, matched=16), view(1), view(2, matched=48), view(3, matched=16, prompt=9999), view(0)]
    assert order(lpm, views) == [2, 3, 4, 0, 1]


def test_lpm_counts_each_pass_waited_as_matched_tokens() -> None:
    long_match = view(1, matched=10 * AGING_CREDIT)
    assert order(lpm, [long_match, view(0, passes=9)]) == [1, 0]
    assert order(lpm, [long_match, view(0, passes=10)]) == [0, 1]
    assert order(lpm, [long_match, view(2, passes=11)]) == [2, 1]


def test_shortest_prefill_first_counts_what_is_left_of_prompt_and_output() -> None:
    views = [
        view(0, prompt=50, output=10),
        view(1, prompt=500, output=10, matched=460),
        view(2, prompt=20, output=40),
        view(3, prompt=20, output=31),
        view(4, prompt=60, output=10, matched=10),
    ]
    assert order(shortest_prefill_first, views) == [1, 3, 0, 2, 4]


def test_shortest_prefill_first_holds_no_work_for_one_token() -> None:
    at_start = QueueView(prompt_len=10, max_tokens=1, matched_len=9, arrival=0)
    assert shortest_prefill_first(at_start) == 2
    assert shortest_prefill_first(at_start._replace(max_tokens=0, matched_len=10)) == 1


@pytest.mark.parametrize("rule", [lpm, shortest_prefill_first])
def test_nobody_sorts_ahead_of_a_request_that_came_the_bound_earlier(rule: Rule) -> None:
    max_model_len = 1000
    bound = max_overtaken_passes(max_model_len)
    assert bound == 32
    worst = view(0, prompt=max_model_len - 1, output=1, passes=bound)
    best = view(1, prompt=max_model_len - 1, output=1, matched=max_model_len - 2)
    shortest = view(2, prompt=1, output=1)
    assert order(rule, [best, shortest, worst])[0] == 0
    # The bound is no looser than it has to be: two passes less, and the newcomer is ahead.
    assert order(rule, [best, worst._replace(joined_pass=NOW - bound + 2)])[0] == 1
    assert max_overtaken_passes(10**6) == GENERATION_PASSES


def test_hrrn_takes_the_highest_ratio_of_waiting_to_own_work() -> None:
    views = [
        view(0, prompt=1000)._replace(prefilled_since=500),  # 500 / 1000
        view(1, prompt=1000, matched=900)._replace(prefilled_since=300),  # 300 / 100
        view(2, prompt=100)._replace(prefilled_since=300),  # 300 / 100
        view(3, prompt=10)._replace(prefilled_since=0),
        view(4, prompt=50, matched=49)._replace(prefilled_since=3),  # 3 / 1
        view(5, prompt=50, matched=49)._replace(prefilled_since=4),  # 4 / 1
        view(6, prompt=8, matched=4)._replace(prefilled_since=0),
    ]
    assert order(hrrn, views) == [5, 1, 2, 4, 0, 3, 6]


def test_lof_takes_the_longest_output_first() -> None:
    views = [view(3, output=7), view(0, output=6), view(2, output=7, matched=50), view(1, output=9)]
    assert order(lof, views) == [1, 2, 3, 0]


def test_random_is_a_shuffle_that_the_seed_alone_decides() -> None:
    views = [view(i) for i in range(200)]
    first = order(partial(random_order, seed=1), views)
    assert sorted(first) == list(range(200))
    assert first == order(partial(random_order, seed=1), [each._replace(matched_len=9) for each in views[::-1]])
    assert first != order(partial(random_order, seed=2), views)
    # Each place is about as likely for each arrival: over seeds, the mean place of one is in the middle.
    places = [order(partial(random_order, seed=seed), views[:20]).index(3) for seed in range(400)]
    assert set(places) == set(range(20))
    assert abs(float(np.mean(places)) - 9.5) < 4 * 5.8 / 20


def test_routing_key_takes_what_runs_most_first() -> None:
    running = {"a": 2, "b": 3, "d": 2}
    views = [
        view(i)._replace(routing_key=key, num_running_alike=running.get(key, 0) if key else 0)
        for i, key in enumerate(["c", None, "a", "b", "d", "a", "B", "b", "c", None])
    ]
    assert order(routing_key, views) == [3, 7, 2, 5, 4, 1, 9, 6, 0, 8]


def test_routing_keys_of_any_type_are_ordered() -> None:
    views = [view(i)._replace(routing_key=key, num_running_alike=i % 2) for i, key in enumerate([(1, "x"), 7, "7", 3])]
    assert order(routing_key, views) == [3, 1, 0, 2]


def test_names() -> None:
    assert [make_policy(name).name for name in SCHEDULE_POLICIES] == list(SCHEDULE_POLICIES)
    assert make_policy("priority").rule is fcfs
    assert make_policy("dfs-weight").rule is None
    with pytest.raises(ValueError, match="schedule_policy='best' is not one of 'fcfs', 'priority', 'lpm'"):
        make_policy("best")


@pytest.mark.parametrize("key", [3, -1.5, True, math.inf, (), (1, 2.0), Fraction(1, 3), np.float32(2), np.int64(3)])
def test_a_rule_of_ones_own_gives_numbers(key: object) -> None:
    policy = make_policy(lambda view: key)  # type: ignore[arg-type, return-value]
    assert policy.key(view(0)) == (key if isinstance(key, tuple) else (key,))


@pytest.mark.parametrize("key", [None, "a", math.nan, (1, math.nan), (1, None), [1], 1j, ((1, 2), 3), np.zeros(2)])
def test_other_keys_are_refused_with_the_name_of_the_rule(key: object) -> None:
    def by_mood(view: QueueView) -> float:
        return key  # type: ignore[return-value]

    with pytest.raises(TypeError, match=r"schedule policy .*by_mood gave .* for the request of arrival 4; a key is a"):
        make_policy(by_mood).key(view(4))
