"""Who gives way: running requests whose pages are taken away for a while.

They wait again, with their arrival, and their KV stays in the tree until somebody needs the room.
"""

from collections.abc import Iterable

from radix_jax.scheduler.request_state import RequestState


def retraction_order(running: Iterable[RequestState]) -> list[RequestState]:
    """Who gives way first where the pool is short: lowest priority, fewest outputs, longest prompt, newest."""
    return sorted(running, key=_loss)


def preemption_order(running: Iterable[RequestState], priority: int, threshold: int) -> list[RequestState]:
    """Who gives way to a waiting request of `priority`: those at least `threshold` below it, lowest first, of equal
    ones the newest."""
    weaker = [state for state in running if priority - state.request.priority >= threshold]
    return sorted(weaker, key=lambda state: (state.request.priority, -state.request.arrival))


def _loss(state: RequestState) -> tuple[int, int, int, int]:
    request = state.request
    return request.priority, state.num_outputs, -request.prompt_len, -request.arrival
