"""RunningBatch: the admitted requests, and their rows in a step."""

from collections.abc import Iterator

import numpy as np

from radix_jax.plan import PromptLogprobs, StepPlan, StepRow
from radix_jax.scheduler.admission import Admission
from radix_jax.scheduler.budget import NewTokenRatio, num_pages_to_come
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.seats import Seats
from radix_jax.scheduler.waiting import WaitingQueue

_UNKNOWN = np.zeros(1, np.int32)  # in the place of a token that only the device knows yet


class RunningBatch:
    """Admitted requests in the order of their admission, each with pages of its own, a lock on its prefix and a
    seat."""

    def __init__(self, admission: Admission, waiting: WaitingQueue, page_size: int):
        self._admission = admission
        self._waiting = waiting
        self._page_size = page_size
        self._states: dict[str, RequestState] = {}
        self._seats = Seats()
        self._unfinished: RequestState | None = None

    @property
    def unfinished(self) -> RequestState | None:
        """The request whose prompt is computed in part, if any; all others decode."""
        return self._unfinished

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def get(self, request_id: str) -> RequestState | None:
        """The running request of that id."""
        return self._states.get(request_id)

    def state_of(self, row: StepRow) -> RequestState | None:
        """The request of a plan's row, unless it ended."""
        state = self._states.get(row.request.request_id)
        return state if state is not None and state.request is row.request else None

    def decoding(self) -> list[RequestState]:
        """Requests whose next step computes the token that was sampled last, known to the host or not; those that need
        its value only once it is known."""
        unfinished = self._unfinished
        return [
            state
            for state in self._states.values()
            if state.num_to_sample
            and state is not unfinished
            and not (state.num_pending and state.request.needs_values)
        ]

    def enter(self, state: RequestState) -> None:
        """An admitted request runs from now on."""
        state.seat = self._seats.take()
        self._states[state.request_id] = state

    def leave(self, state: RequestState) -> None:
        """Take a request out and give back what it holds."""
        self._admission.release(state)
        del self._states[state.request_id]
        self._seats.give_back(state.seat)
        self._end_prompt(state)

    def clear(self) -> None:
        """Take all requests out."""
        for state in list(self):
            self.leave(state)

    def num_reserved(self, ratio: NewTokenRatio) -> int:
        """Pages that the running requests are expected to take yet."""
        return sum(num_pages_to_come(state, ratio.value, self._page_size) for state in self)

    def num_missing(self, states: list[RequestState], num_steps: int) -> int:
        """Pages that so many decode steps of `states` take."""
        return sum(self._admission.num_missing(state, state.num_computed + num_steps) for state in states)

    def prompt_row(self, state: RequestState, num_left: int) -> StepRow:
        """As much of the known tokens as `num_left` allows, up to their end or to a page.

        Its full pages are shared at once, since steps run in the order of their plans.
        """
        end = state.num_computed + num_left
        if end < state.num_tokens:
            end -= end % self._page_size
        else:
            end = state.num_tokens
        self._admission.extend(state, end)
        start, state.num_computed = state.num_computed, end
        samples = end == state.num_tokens
        row = StepRow(
            request=state.request,
            token_ids=state.tokens[start:end].copy(),
            start=start,
            pages=state.pages,
            samples=samples,
            copy=state.copy,
            seat=state.seat,
            output_ids=state.output_ids.copy() if samples else state.output_ids[:0],
            num_prompt_logprobs=-1 if state.prompt_logprobs is None else state.prompt_logprobs.num_asked,
        )
        state.copy = None
        self.share(state, end, in_plan=True)
        if row.samples:
            self._end_prompt(state)
            self._waiting.note_prompt_computed(state)
        elif self._unfinished is not state:
            self._unfinished = state
            self._waiting.note_computing(state)
        return row

    def decode_rows(self, states: list[RequestState], num_steps: int, first_place: int) -> list[StepRow]:
        """The next token of each request, and as many more as there are steps; the rows of a plan from `first_place`
        on."""
        page_size = self._page_size
        self._admission.extend_all(
            [state for state in states if state.num_computed + num_steps > state.num_pages * page_size], num_steps
        )
        rows = []
        for place, state in enumerate(states, first_place):
            start = state.num_computed
            if state.num_pending:
                token_ids, source = _UNKNOWN, state.source
            else:
                token_ids, source = state.tokens[start : start + 1].copy(), None
            rows.append(StepRow(state.request, token_ids, start, state.pages, True, source, None, state.seat))
            state.num_computed = start + num_steps
            state.num_pending += num_steps
            state.source = place
        return rows

    def share(self, state: RequestState, end: int, *, in_plan: bool = False) -> bool:
        """Give the full pages of tokens [0, end) to the tree, and tell those who wait for them; whether there were.
        in_plan: as in `Admission.insert`."""
        version = self._admission.tree_version
        tokens = self._admission.insert(state, end, in_plan=in_plan)
        if tokens:
            self._waiting.note_inserted(state, tokens, self._admission.tree_version - version)
        return bool(tokens)

    def take_prompt_logprobs(self, plan: StepPlan, values: PromptLogprobs) -> None:
        """Take over what a step says of prompts, and keep it beside the pages that are cached."""
        first = 0
        for row in plan.rows[: plan.num_prompt_rows]:
            end = first + len(row.token_ids)
            state = self.state_of(row) if row.num_prompt_logprobs >= 0 else None
            if state is not None and state.prompt_logprobs is not None:
                state.prompt_logprobs.take(row.start + 1, PromptLogprobs(*(value[first:end] for value in values)))
                self._admission.save_prompt_logprobs(state)
            first = end

    def check_integrity(self, may_wait: bool) -> None:
        """Prove that each request has a seat, and is computed as far as its tokens are known or sampled.

        may_wait: a step is in flight.

        Raises:
            AssertionError: what is off.
        """
        self._seats.check_integrity(state.seat for state in self)
        for state in self:
            num_known = state.num_tokens + state.num_pending - 1
            if state.num_computed != num_known and state is not self._unfinished:
                raise AssertionError(f"{state.request_id!r} computed {state.num_computed} of {num_known} tokens")
            if state.num_pending and not may_wait:
                raise AssertionError(f"{state.request_id!r} waits for {state.num_pending} tokens, nothing is in flight")

    def _end_prompt(self, state: RequestState) -> None:
        if self._unfinished is state:
            self._unfinished = None
            self._waiting.forget_computing(state.request_id)
