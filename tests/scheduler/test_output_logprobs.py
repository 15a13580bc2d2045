"""OutputLogprobs: the output token first, then the most likely ones, by rank."""

import numpy as np
from scheduling import RequestMaker, make_scheduler

from radix_jax import SamplingParams
from radix_jax.plan import TokenLogprobs
from radix_jax.request import Logprob, Request
from radix_jax.scheduler.output_logprobs import OutputLogprobs

STEP = TokenLogprobs(
    sampled=np.array([-0.5, -3.0, -1.0], np.float32),
    rank=np.array([1, 9, 3], np.int32),
    sampling=np.array([0.0, -2.0, -0.25], np.float32),
    top_ids=np.array([[7, 8, 9]] * 3, np.int32),
    top=np.array([[-0.5, -1.0, -1.0]] * 3, np.float32),
)


def test_the_output_token_is_always_there() -> None:
    logprobs = OutputLogprobs(2)
    logprobs.append(30, STEP, 1)
    logprobs.append(7, STEP, 0)
    assert [list(entry.items()) for entry in logprobs.by_token] == [
        [(30, Logprob(-3.0, 9)), (7, Logprob(-0.5, 1)), (8, Logprob(-1.0, 2))],
        [(7, Logprob(-0.5, 1)), (8, Logprob(-1.0, 2))],
    ]
    assert logprobs.sampling == [-2.0, 0.0]
    assert logprobs.total == -3.5


def test_among_equals_the_order_of_the_best_ones_is_the_rank() -> None:
    logprobs = OutputLogprobs(2)
    logprobs.append(8, STEP, 2)
    assert list(logprobs.by_token[0].items()) == [(8, Logprob(-1.0, 2)), (7, Logprob(-0.5, 1))]


def test_none_besides() -> None:
    logprobs = OutputLogprobs(0)
    logprobs.append(8, STEP, 2)
    assert logprobs.by_token == [{8: Logprob(-1.0, 3)}]


def test_a_commit_gives_them_to_those_who_asked() -> None:
    scheduler, make = make_scheduler(), RequestMaker()
    plain = scheduler.add(make([1, 2], max_tokens=2))
    asking = Request(
        request_id="asks",
        token_ids=np.array([3, 4], np.int32),
        sampling=SamplingParams(logprobs=1),
        max_tokens=2,
        stop_ids=frozenset(),
        seed=0,
        arrival=1,
    )
    state = scheduler.add(asking)
    plan = scheduler.plan()
    assert plan is not None
    assert [row.request for row in plan.rows] == [plain.request, asking]
    scheduler.commit(plan, np.array([30, 30], np.int32), None, STEP)
    assert plain.logprobs is None
    assert state.logprobs is not None
    assert state.logprobs.by_token == [{30: Logprob(-3.0, 9), 7: Logprob(-0.5, 1)}]
    assert state.logprobs.sampling == [-2.0]
