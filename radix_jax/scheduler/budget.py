"""How much of the pool is kept for running requests: their known tokens in full, and a share of the output to come.

Most outputs end before max_tokens, so reserving all of it would leave the pool half empty. Reserving too little is
mended by retraction, which costs a prefill of what was evicted meanwhile.
"""

import math
from collections.abc import Iterable

from radix_jax.scheduler.request_state import RequestState

FIRST_RATIO, LEAST_RATIO = 0.7, 0.098
DECAY_STEPS = 600  # decode steps from the one to the other
RETRACTION_STEPS = 20  # decode steps that a retraction makes room for
MAX_OUTPUT_LEN = 4096  # output tokens that are looked ahead at most


class NewTokenRatio:
    """The share of a running request's remaining output that pages are kept for.

    It falls linearly over the decode steps from 0.7 to 0.098, and a retraction sets it to
    (tokens generated + 20 * requests) / (sum of max_tokens + 1) over the requests that run on, at most 1. The numbers
    are SGLang's.
    """

    def __init__(self) -> None:
        self.value = FIRST_RATIO

    @property
    def is_least(self) -> bool:
        """Whether more decode steps change nothing."""
        return self.value == LEAST_RATIO

    def count_decode_steps(self, num_steps: int) -> None:
        """So many steps passed without a retraction."""
        self.value = max(LEAST_RATIO, self.value - num_steps * (FIRST_RATIO - LEAST_RATIO) / DECAY_STEPS)

    def note_retraction(self, running: Iterable[RequestState]) -> None:
        """Some request was retracted; `running` go on."""
        states = list(running)
        num_outputs = sum(state.num_outputs for state in states) + RETRACTION_STEPS * len(states)
        self.value = min(1.0, num_outputs / (sum(state.request.max_tokens for state in states) + 1))

    def reset(self) -> None:
        """Nothing runs any more."""
        self.value = FIRST_RATIO


def num_pages_to_come(state: RequestState, ratio: float, page_size: int) -> int:
    """Pages that a request is expected to ask for yet: for its known tokens, and for the share `ratio` of its output.

    A request that ignores its end of sequence has its whole output to come.
    """
    last_len = len(state.tokens) - 1  # the last output token needs no KV
    known_len = min(state.num_tokens + state.num_pending, last_len)
    num_known = max(state.num_pages, -(-known_len // page_size))
    num_output = -(-min(last_len, known_len + MAX_OUTPUT_LEN) // page_size) - num_known
    if ratio < 1.0 and not state.request.sampling.ignore_eos:
        num_output = math.ceil(num_output * ratio)
    return num_known - state.num_pages + max(num_output, 0)
