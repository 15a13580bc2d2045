"""The waiting requests in the order of a policy, kept between steps: only what changed gets a new key and place.

What the cache holds of each is kept exact by `PrefixMatches`. A step in which neither the tree nor what the policy
reads has changed matches nothing, makes no key and sorts nothing.
"""

import bisect
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.scheduler.depth_first import Hanging, depth_first_order
from radix_jax.scheduler.matches import PrefixMatches, TrackedMatch
from radix_jax.scheduler.policy import GENERATION_PASSES, KeyParts, Policy, QueueContext, QueueView
from radix_jax.scheduler.request_state import RequestState, Ticket

_FEW = 8  # one in so many is moved singly; for more the whole order is gone through


class Standing(NamedTuple):
    """Where a request stands in the queue, for people to read.

    num_ahead: requests before it. generation, key: what it is sorted by, after its priority; see `policy`.
    matched_len, passes_waited: as in QueueView.
    """

    num_ahead: int
    generation: int
    key: KeyParts
    matched_len: int
    passes_waited: int


class WaitingEntry:
    """A waiting request and what the queue knows of it.

    match: None while nothing that is cached serves it. rank: sorts it among the others and ends with the entry itself;
        None while it has to be made anew.
    """

    __slots__ = ("match", "rank", "sequence", "state", "ticket")

    def __init__(self, state: RequestState, ticket: Ticket, sequence: int, match: TrackedMatch | None):
        self.state = state
        self.ticket = ticket
        self.sequence = sequence
        self.match = match
        self.rank: _Rank | None = None

    @property
    def matched_len(self) -> int:
        """Tokens in the cache, in whole pages and without the last known token; current when `in_order` yields it."""
        return self.match.peek.cached_len if self.match is not None else 0


# -priority, generation, key, arrival, sequence, entry
_Rank = tuple[int, int, KeyParts, int, int, WaitingEntry]


class WaitingQueue:
    """Waiting requests, ordered by a policy. Looks at the cache only through its peek, and not at all for requests that
    share nothing, whose matched length is 0."""

    def __init__(self, policy: Policy, cache: PrefixCache):
        self._policy = policy
        self._cache = cache
        self._num_passes = 0
        self._sequence = itertools.count()
        self._context = QueueContext()
        self.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def policy_name(self) -> str:
        """What the requests are sorted by."""
        return self._policy.name

    def add(self, state: RequestState, num_prefill_tokens: int = 0, ticket: Ticket | None = None) -> Ticket:
        """Append a request; allowed while `in_order` runs.

        num_prefill_tokens: prompt tokens that the scheduler computed so far.
        ticket: what the first `add` of a request gave, so that one that was retracted keeps its seniority.

        Raises:
            TypeError: as `Policy.key`, or what a rule of one's own raises; then nothing is added.
        """
        ticket = ticket or Ticket(self._num_passes, num_prefill_tokens)
        entry = WaitingEntry(state, ticket, next(self._sequence), self._match(state))
        if self._policy.checked:
            try:
                self._policy.key(self._view(entry))
            except Exception:
                self._matches.forget(state.request_id)
                raise
        self._entries[state.request_id] = self._unranked[state.request_id] = entry
        self._num_changes += 1
        return ticket

    def remove(self, request_id: str) -> None:
        """Take a request out; allowed while `in_order` runs."""
        entry = self._entries[request_id]
        if not self._pass_runs:
            self._ranked_at = None if self._policy.rule is None else self._ranked_at
        elif self._policy.rule is None and entry.match is not None:
            self._unrank_matches(self._matches.refresh_losses())
            if entry.rank is None:  # the weights do not count it yet
                self._ranked_at = None
            self._left.append(Hanging(self._matches.follow(entry.match), entry.state.request.arrival, -1))
        self._matches.forget(request_id)
        self._unrank([entry])
        del self._unranked[request_id]
        del self._entries[request_id]

    def clear(self) -> None:
        """Take every request out, and forget who computes."""
        self._matches = PrefixMatches(self._cache)
        self._computing = PrefixMatches(self._cache)
        self._entries: dict[str, WaitingEntry] = {}
        self._ranked: list[_Rank] = []
        self._unranked: dict[str, WaitingEntry] = {}
        self._left: list[Hanging] = []  # of dfs-weight: who left during the pass that runs
        self._epoch_of_left = 0
        self._pass_runs = False
        self._ranked_at: object = None
        self._num_changes = 0

    def match_anew(self) -> None:
        """Requests share in other namespaces than before, or no more: match all that wait, and forget who computes. Not
        while `in_order` runs."""
        self._matches, self._computing = PrefixMatches(self._cache), PrefixMatches(self._cache)
        for entry in self._entries.values():
            entry.match = self._match(entry.state)
        self._unrank_all()
        self._ranked_at = None

    def in_order(self, context: QueueContext | None = None) -> Iterator[WaitingEntry]:
        """The waiting requests, best first, each once, with its matched length as it is when it is yielded.

        Requests may come and go, pages be inserted and evicted between two yields: the next one is always the first of
        those that now wait and were not yielded. One pass at a time. context: as of this pass; an empty one by default.

        Of dfs-weight, who leaves while this runs counts for the weights until it ends: so a subtree is finished.

        Raises:
            TypeError: as `Policy.key`, or what a rule of one's own raises. The queue stays as it is.
        """
        context = context or QueueContext()
        self._context = QueueContext(context.num_prefill_tokens, dict(context.running_keys))
        self._pass_runs = True
        try:
            yield from self._in_order()
        finally:
            self._pass_runs = False
            if self._left:
                self._left.clear()
                self._ranked_at = None

    def end_pass(self) -> None:
        """Somebody was admitted: it counts as a pass for all who still wait."""
        self._num_passes += 1

    def note_inserted(self, state: RequestState, tokens: range, version_rise: int) -> None:
        """Pages just entered the tree: match on what waited for them. Allowed while `in_order` runs.

        tokens: range of `state`'s tokens, whole pages. version_rise: by how much the insertion raised tree.version.
        """
        self._unrank_matches(self._matches.note_inserted(state, tokens, version_rise))
        self._computing.note_inserted(state, tokens, version_rise)

    def note_prompt_computed(self, state: RequestState) -> None:
        """The prompt of a request is in the tree: its waiting samples may share that where its mode is "write". Allowed
        while `in_order` runs. Changes nothing for those that read the cache already, or never do."""
        if state.reads or not state.writes:
            return
        group = state.group
        group.computed_version = state.weight_version
        entries = [entry for entry in self._entries.values() if entry.state.group is group]
        for entry in entries:
            entry.match = self._match(entry.state)
        self._unrank(entries)

    def note_computing(self, state: RequestState) -> None:
        """A request runs and will compute more of its prompt in later steps; what it computed so far is in the tree."""
        if state.writes:
            self._computing.track(state, state.num_tokens)

    def forget_computing(self, request_id: str) -> None:
        """The rest of the request's prompt is in the tree, or it left; also for one that was never noted."""
        self._computing.forget(request_id)

    def would_repeat(self, entry: WaitingEntry) -> bool:
        """Whether a request that computes its prompt will, in a later step, compute the very page `entry` needs next.

        A look-up of that page among those that computing requests come to next, and then whether both have the same
        prefix in front of it: the same place in the tree, so no tokens are compared. False where nothing is shared.
        """
        if entry.match is None or not len(self._computing):
            return False
        self._settle()
        self._computing.refresh_losses()
        node = self._matches.follow(entry.match).node
        return any(
            match.peek.cached_len == 0 or self._computing.follow(match).node is node
            for match in self._computing.at_place_of(entry.match)
        )

    def standing(self, request_id: str) -> Standing:
        """Where a request stands, as the last pass saw the rest of the engine.

        Raises:
            KeyError: no such request waits. TypeError: as `in_order`.
        """
        entry = self._entries[request_id]
        self._settle()
        assert entry.rank is not None
        return Standing(
            num_ahead=bisect.bisect_left(self._ranked, entry.rank),
            generation=entry.rank[1],
            key=entry.rank[2],
            matched_len=entry.matched_len,
            passes_waited=self._num_passes - entry.ticket.joined_pass,
        )

    def check_integrity(self) -> None:
        """Prove that matches are what they should be, and that each request is in the order once or to be put there.

        Raises:
            AssertionError: what is off. Linear in all that waits.
        """
        for matches in (self._matches, self._computing):
            matches.check_integrity()
        num_sharing = sum(entry.match is not None for entry in self._entries.values())
        if len(self._matches) != num_sharing:
            raise AssertionError(f"{len(self._matches)} matches are kept of {num_sharing} waiting requests that share")
        if any(first >= second for first, second in itertools.pairwise(self._ranked)):
            raise AssertionError("the waiting requests are out of order")
        placed = [rank[-1].state.request_id for rank in self._ranked] + list(self._unranked)
        if sorted(placed) != sorted(self._entries) or any(rank[-1].rank is not rank for rank in self._ranked):
            raise AssertionError(
                f"{len(self._entries)} requests wait, {len(placed)} are in the order or to be put there"
            )

    def _match(self, state: RequestState) -> TrackedMatch | None:
        """What the cache holds of a request, kept exact from here on. How much of it helps a prompt whose
        log-probabilities are asked for is known on admission only."""
        tracks = state.reads and not state.lacks_prompt_logprobs
        return self._matches.track(state, state.num_tokens - 1) if tracks else None

    def _in_order(self) -> Iterator[WaitingEntry]:
        yielded: set[int] = set()
        place, num_changes = 0, -1
        while True:
            self._settle()
            if num_changes != self._num_changes:
                place, num_changes = 0, self._num_changes
            while place < len(self._ranked) and self._ranked[place][-2] in yielded:
                place += 1
            if place == len(self._ranked):
                return
            entry = self._ranked[place][-1]
            if entry.match is not None and not self._matches.is_exact(entry.match):
                self._unrank([entry])
                continue
            yielded.add(entry.sequence)
            yield entry

    def _settle(self) -> None:
        """Put every request where it belongs now. What a rule of one's own raises leaves the rest still to be put."""
        self._unrank_matches(self._matches.refresh_losses())
        if self._left and self._epoch_of_left != self._matches.epoch:
            self._forget_evicted_left(self._matches.epoch)
        policy, context = self._policy, self._context
        ranked_at = (
            policy.reads_passes and self._num_passes,
            policy.reads_prefill and context.num_prefill_tokens,
            policy.reads_running and context.running_keys,
        )
        if self._ranked_at != ranked_at or (policy.rule is None and self._unranked):
            self._unrank_all()
            self._ranked_at = ranked_at
        if not self._unranked:
            return
        keys = self._depth_first_keys() if policy.rule is None else None
        ranks = [
            self._rank(entry, policy.key(self._view(entry)) if keys is None else (keys.get(entry.sequence, 0),))
            for entry in self._unranked.values()
        ]
        for rank in ranks:
            rank[-1].rank = rank
        if self._ranked and len(ranks) < len(self._ranked) // _FEW:
            for rank in ranks:
                bisect.insort(self._ranked, rank)
        else:
            self._ranked = sorted(self._ranked + ranks)
        self._unranked.clear()
        self._num_changes += 1

    def _rank(self, entry: WaitingEntry, key: KeyParts) -> _Rank:
        request = entry.state.request
        generation = entry.ticket.joined_pass // GENERATION_PASSES
        return -request.priority, generation, key, request.arrival, entry.sequence, entry

    def _unrank(self, entries: list[WaitingEntry]) -> None:
        """Take entries out of the order, to be put there anew."""
        self._num_changes += 1
        few = len(entries) < len(self._ranked) // _FEW
        for entry in entries:
            self._unranked[entry.state.request_id] = entry
            if few and entry.rank is not None:
                del self._ranked[bisect.bisect_left(self._ranked, entry.rank)]
            entry.rank = None
        if not few:
            self._ranked = [rank for rank in self._ranked if rank[-1].rank is rank]

    def _unrank_matches(self, matches: list[TrackedMatch]) -> None:
        if matches:
            self._unrank([self._entries[match.state.request_id] for match in matches])

    def _unrank_all(self) -> None:
        for rank in self._ranked:
            entry = rank[-1]
            entry.rank = None
            self._unranked[entry.state.request_id] = entry
        self._ranked.clear()
        self._num_changes += 1

    def _forget_evicted_left(self, epoch: int) -> None:
        """Who left counts for the weights only as long as its prefix is there, though the same tokens may come back."""
        kept = [each._replace(peek=peek) for each in self._left if (peek := each.peek.followed()) is not None]
        if len(kept) < len(self._left):
            self._ranked_at = None
        self._left, self._epoch_of_left = kept, epoch

    def _depth_first_keys(self) -> dict[int, int]:
        """The place in the order of dfs-weight of each entry that shares, by its sequence number."""
        matches = self._matches
        left = [each._replace(peek=peek) for each in self._left if (peek := each.peek.followed()) is not None]
        assert len(left) == len(self._left), "those whose prefix was evicted are forgotten before"
        waiting = [
            Hanging(matches.follow(entry.match), entry.state.request.arrival, entry.sequence)
            for entry in self._entries.values()
            if entry.match is not None
        ]
        return {sequence: place for place, sequence in enumerate(depth_first_order(waiting + left))}

    def _view(self, entry: WaitingEntry) -> QueueView:
        state, request, context = entry.state, entry.state.request, self._context
        key = request.routing_key
        return QueueView(
            prompt_len=state.num_tokens,
            max_tokens=len(state.tokens) - state.num_tokens,
            matched_len=entry.matched_len,
            arrival=request.arrival,
            joined_pass=entry.ticket.joined_pass,
            num_passes=self._num_passes,
            prefilled_since=max(context.num_prefill_tokens - entry.ticket.num_prefill_tokens, 0),
            routing_key=key,
            num_running_alike=0 if key is None else context.running_keys.get(key, 0),
        )
