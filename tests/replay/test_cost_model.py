"""The cost model: its sum, and that a fit finds the costs that made the times."""

import math

import numpy as np
import pytest
from scipy.optimize import nnls

from radix_jax.replay import CostModel, StepCounts


def test_seconds_are_the_sum_of_counts_times_costs():
    costs = CostModel(per_step_s=1.0, per_prefill_token_s=0.5, per_decode_row_s=0.25, per_context_token_s=0.125)
    assert costs.seconds_s(StepCounts(2, 4, 8, 16)) == 2 + 2 + 2 + 2


def random_counts(rng: np.random.Generator, num_steps: int) -> list[StepCounts]:
    return [StepCounts(1, *(int(rng.integers(high)) for high in (2000, 64, 100_000))) for _ in range(num_steps)]


def test_fit_finds_the_costs():
    costs = CostModel(per_step_s=0.01, per_prefill_token_s=2e-5, per_decode_row_s=0.0, per_context_token_s=3e-8)
    measured = [(one, costs.seconds_s(one)) for one in random_counts(np.random.default_rng(0), 50)]
    fitted = CostModel.fit(measured)
    for name in ("per_step_s", "per_prefill_token_s", "per_decode_row_s", "per_context_token_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(costs, name), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_noisy_times_never_give_a_negative_cost_and_the_error_is_the_least(seed: int):
    rng = np.random.default_rng(seed)
    measured = [(one, float(rng.random())) for one in random_counts(rng, 8)]
    fitted = CostModel.fit(measured)
    matrix = np.array([[1, c.num_prefill_tokens, c.num_decode_rows, c.num_context_tokens] for c, _ in measured], float)
    times = np.array([seconds for _, seconds in measured])
    scale = matrix.max(axis=0)
    _, least = nnls(matrix / scale, times)
    ours = np.linalg.norm([fitted.seconds_s(counts) - seconds for counts, seconds in measured])
    assert ours == pytest.approx(least, rel=1e-6)


def test_costs_that_stop_the_clock_or_run_it_backwards_are_refused():
    names = ("per_step_s", "per_prefill_token_s", "per_decode_row_s", "per_context_token_s")
    with pytest.raises(ValueError, match="all costs are 0"):
        CostModel(**dict.fromkeys(names, 0.0))
    for name in names:
        with pytest.raises(ValueError, match=f"{name}=-1.0 is below 0"):
            CostModel(**{name: -1.0})
        with pytest.raises(ValueError, match=f"{name}=inf would stop the clock"):
            CostModel(**{name: math.inf})
    with pytest.raises(ValueError, match="3 steps don't determine"):
        CostModel.fit([(StepCounts(1, 1, 1, 1), 1.0)] * 3)
