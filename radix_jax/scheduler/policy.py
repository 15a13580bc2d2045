"""Which waiting request goes first: each policy is a pure function from a read-only view to a sort key.

Keys sort ascending; equal keys go by arrival. `lpm` and `shortest_prefill_first` age: every pass that admits others
and not this request is worth AGING_CREDIT tokens to it. So they starve nobody: of two requests that came more than
`max_overtaken_passes` apart, the earlier one always sorts first.
"""

from collections.abc import Callable
from typing import NamedTuple

AGING_CREDIT = 32
"""Tokens of cached prefix that one pass of waiting outweighs."""


class QueueView(NamedTuple):
    """What a policy may know of a waiting request; lengths in tokens.

    matched_len: prompt tokens in the cache now, at most prompt_len - 1.
    passes_waited: passes that admitted somebody else since the request came.
    arrival: place in the order of arrival.
    """

    prompt_len: int
    max_tokens: int
    matched_len: int
    passes_waited: int
    arrival: int


Policy = Callable[[QueueView], int]


def fcfs(view: QueueView) -> int:
    """First come, first served."""
    return view.arrival


def lpm(view: QueueView) -> int:
    """Longest prefix match first, with aging: -(matched + credit * passes waited)."""
    return -(view.matched_len + AGING_CREDIT * view.passes_waited)


def shortest_prefill_first(view: QueueView) -> int:
    """Least work first, with aging: max(1, prompt + output - matched) - credit * passes waited."""
    work = max(1, view.prompt_len + view.max_tokens - view.matched_len)
    return work - AGING_CREDIT * view.passes_waited


def max_overtaken_passes(max_model_len: int) -> int:
    """Passes after its arrival during which newcomers may still sort ahead of a request; none that comes later does.

    Both aging keys differ by less than max_model_len between two requests that came together.
    """
    return -(-max_model_len // AGING_CREDIT)


_POLICIES: dict[str, Policy] = {"fcfs": fcfs, "lpm": lpm, "shortest-prefill-first": shortest_prefill_first}


def policy_by_name(name: str) -> Policy:
    """The policy that `EngineConfig.schedule_policy` names.

    Raises:
        ValueError: no such policy.
    """
    if name not in _POLICIES:
        raise ValueError(f"schedule_policy={name!r} is not one of {', '.join(map(repr, _POLICIES))}")
    return _POLICIES[name]


class QueueContext(NamedTuple):
    num_prefill_tokens: int = 0
    running_keys: object = None


def make_policy(policy: "str | Policy", seed: int = 0) -> Policy:
    return policy_by_name(policy) if isinstance(policy, str) else policy
