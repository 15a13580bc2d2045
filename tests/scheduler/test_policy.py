"""The exact order of each policy, ties included, and how long aging lets anybody wait."""

import pytest

from radix_jax.scheduler.policy import (
    AGING_CREDIT,
    Policy,
    QueueView,
    fcfs,
    lpm,
    max_overtaken_passes,
    policy_by_name,
    shortest_prefill_first,
)


def view(arrival: int, *, prompt: int = 100, output: int = 10, matched: int = 0, passes: int = 0) -> QueueView:
    return QueueView(prompt_len=prompt, max_tokens=output, matched_len=matched, passes_waited=passes, arrival=arrival)


def order(policy: Policy, views: list[QueueView]) -> list[int]:
    """Arrivals in policy order, as the queue sorts: equal keys by arrival."""
    return [each.arrival for each in sorted(views, key=lambda each: (policy(each), each.arrival))]


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
    assert shortest_prefill_first(view(0, prompt=10, output=1, matched=9)) == 2
    assert shortest_prefill_first(view(0, prompt=10, output=0, matched=10)) == 1


@pytest.mark.parametrize("policy", [lpm, shortest_prefill_first])
def test_nobody_sorts_ahead_of_a_request_that_came_the_bound_earlier(policy: Policy) -> None:
    max_model_len = 1000
    bound = max_overtaken_passes(max_model_len)
    worst = view(0, prompt=max_model_len - 1, output=1, passes=bound)
    best = view(1, prompt=max_model_len - 1, output=1, matched=max_model_len - 2)
    shortest = view(2, prompt=1, output=1)
    assert order(policy, [best, shortest, worst])[0] == 0
    # The bound is no looser than it has to be: two passes less, and the newcomer is ahead.
    assert order(policy, [best, worst._replace(passes_waited=bound - 2)])[0] == 1


def test_names() -> None:
    assert [policy_by_name(name) for name in ("fcfs", "lpm", "shortest-prefill-first")] == [
        fcfs,
        lpm,
        shortest_prefill_first,
    ]
    with pytest.raises(ValueError, match="schedule_policy='random' is not one of 'fcfs', 'lpm'"):
        policy_by_name("random")
