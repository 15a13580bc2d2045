"""Which waiting request goes first: each policy is a pure function from a read-only view to a sort key.

Keys sort ascending; equal keys go by arrival. In front of every policy's key stand two others, so that the whole order
is (-priority, generation, key, arrival):

- A higher priority always goes first.
- A generation is GENERATION_PASSES passes long, and a request belongs to the one in which it came. So no policy, nor a
  rule of one's own, starves anybody inside one priority: of two requests that came GENERATION_PASSES or more passes
  apart, the earlier one always sorts first. A pass is one that admits somebody; only those count.

`lpm` and `shortest-prefill-first` age as well, by AGING_CREDIT tokens a pass: of two requests that came more than
`max_overtaken_passes` apart, the earlier one sorts first. Where contexts are short that comes sooner.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

AGING_CREDIT = 32
"""Tokens of cached prefix that one pass of waiting outweighs."""

GENERATION_PASSES = 4096
"""Passes after its arrival during which newcomers may still sort ahead of a request; none that comes later does."""

SortKey = float | tuple[float | str, ...]
KeyParts = tuple[Any, ...]  # real numbers of any type, and text where a rule of this module gives some

_MASK = 2**64 - 1


@dataclass(frozen=True)
class QueueContext:
    """What the order may depend on besides the waiting requests, as of one pass.

    num_prefill_tokens: prompt tokens that the scheduler computed so far.
    running_keys: running requests of each routing key; only keys of at least one.
    """

    num_prefill_tokens: int = 0
    running_keys: Mapping[Any, int] = field(default_factory=dict)


class QueueView(NamedTuple):
    """What a policy may know of a waiting request; lengths in tokens.

    prompt_len: tokens to have in the cache or to compute before the next one: the prompt, and of a retracted request
        its output so far.
    max_tokens: output tokens still to come at most.
    matched_len: those of prompt_len that the cache holds now, in whole pages, at most prompt_len - 1.
    arrival: place in the order of arrival.
    joined_pass, num_passes: passes counted when the request came, and until now.
    prefilled_since: prompt tokens that the scheduler computed since the request came.
    routing_key: the request's. num_running_alike: running requests with the same one; 0 where it has none.
    """

    prompt_len: int
    max_tokens: int
    matched_len: int
    arrival: int
    joined_pass: int = 0
    num_passes: int = 0
    prefilled_since: int = 0
    routing_key: Hashable = None
    num_running_alike: int = 0

    @property
    def passes_waited(self) -> int:
        """Passes that admitted somebody else since the request came."""
        return self.num_passes - self.joined_pass


Rule = Callable[[QueueView], SortKey]


def fcfs(view: QueueView) -> SortKey:
    """First come, first served."""
    return view.arrival


def lpm(view: QueueView) -> SortKey:
    """Longest prefix match first, with aging: -(matched + credit * passes waited).

    Counted from the pass of arrival, which takes the same from the key of every request: so keys stay while time goes.
    """
    return AGING_CREDIT * view.joined_pass - view.matched_len


def shortest_prefill_first(view: QueueView) -> SortKey:
    """Least work first, with aging: max(1, prompt + output - matched) - credit * passes waited; passes as in `lpm`."""
    work = max(1, view.prompt_len + view.max_tokens - view.matched_len)
    return AGING_CREDIT * view.joined_pass + work


def hrrn(view: QueueView) -> SortKey:
    """Highest response ratio next: -(prompt tokens computed since arrival) / uncached tokens of the own prompt.

    The ratio grows with waiting, but of cached newcomers faster: where more come than can run, a cold request would
    wait for ever without generations. At least one prompt token is never cached.
    """
    return -view.prefilled_since / (view.prompt_len - view.matched_len)


def lof(view: QueueView) -> SortKey:
    """Longest output first: -max_tokens."""
    return -view.max_tokens


def random_order(view: QueueView, seed: int) -> SortKey:
    """A shuffle: a number for each arrival that only the seed decides (splitmix64, Steele et al. 2014)."""
    mixed = (seed * 0xD1342543DE82EF95 + (view.arrival + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 31)


def routing_key(view: QueueView) -> SortKey:
    """Requests whose key runs now, most running first: (0, -count, key), then the others: (1, 0, key). Keys as text."""
    key = "" if view.routing_key is None else str(view.routing_key)
    return (0, -view.num_running_alike, key) if view.num_running_alike else (1, 0, key)


@dataclass(frozen=True)
class Policy:
    """An order of the waiting requests.

    name: for messages. rule: a key for each request; None is dfs-weight, whose order is one of all requests together,
    see `depth_first_order`.
    reads_passes, reads_prefill, reads_running: what of `num_passes` and the QueueContext the rule looks at, so that
    keys stay as they are while that stays.
    checked: the rule is one of the user's own.
    """

    name: str
    rule: Rule | None
    reads_passes: bool = False
    reads_prefill: bool = False
    reads_running: bool = False
    checked: bool = False

    def key(self, view: QueueView) -> KeyParts:
        """The rule's key as a tuple.

        Raises:
            TypeError: a rule of one's own gave no number or tuple of numbers. And whatever that rule raises.
        """
        assert self.rule is not None, f"{self.name} has no key of one request"
        key = self.rule(view)
        parts = key if isinstance(key, tuple) else (key,)
        if self.checked and not all(_is_number(part) for part in parts):
            raise TypeError(
                f"schedule policy {self.name} gave {key!r} for the request of arrival {view.arrival}; "
                "a key is a number or a tuple of numbers, none of them NaN"
            )
        return parts


_RULES: dict[str, Policy] = {
    "fcfs": Policy("fcfs", fcfs),
    "priority": Policy("priority", fcfs),
    "lpm": Policy("lpm", lpm),
    "dfs-weight": Policy("dfs-weight", None),
    "hrrn": Policy("hrrn", hrrn, reads_prefill=True),
    "shortest-prefill-first": Policy("shortest-prefill-first", shortest_prefill_first),
    "lof": Policy("lof", lof),
    "routing-key": Policy("routing-key", routing_key, reads_running=True),
}


def make_policy(policy: str | Rule, seed: int = 0) -> Policy:
    """The policy of that name, or one that sorts by a rule of one's own: QueueView -> number or tuple of numbers.

    - "fcfs": arrival. "priority": the same; a request's priority stands in front of every policy
    - "lpm": longest prefix match, with aging
    - "dfs-weight": depth first through the tree, where more requests wait first
    - "hrrn": highest response ratio
    - "shortest-prefill-first": least work, with aging
    - "lof": longest output
    - "random": shuffled by `seed`
    - "routing-key": first what has the key of running requests

    Raises:
        ValueError: no such policy.
    """
    if callable(policy):
        name = getattr(policy, "__qualname__", repr(policy))
        return Policy(name, policy, reads_passes=True, reads_prefill=True, reads_running=True, checked=True)
    if policy == "random":
        return Policy("random", partial(random_order, seed=seed))
    if policy not in _RULES:
        raise ValueError(f"schedule_policy={policy!r} is not one of {', '.join(map(repr, [*_RULES, 'random']))}")
    return _RULES[policy]


def max_overtaken_passes(max_model_len: int) -> int:
    """Passes after its arrival during which newcomers may sort ahead of a request by `lpm` or `shortest-prefill-first`.

    Both aging keys differ by less than max_model_len between two requests that came together; and never more passes
    than a generation has.
    """
    return min(-(-max_model_len // AGING_CREDIT), GENERATION_PASSES)


def _is_number(part: object) -> bool:
    return isinstance(part, Real) and not math.isnan(part)
