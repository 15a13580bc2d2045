"""What a step costs: a linear model in place of a device."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

from radix_jax.plan import StepPlan


class StepCounts(NamedTuple):
    """What a plan computes, as far as it costs time.

    num_steps: forward passes. num_prefill_tokens: prompt tokens computed. num_decode_rows: rows that compute an output
    token, added up over the passes. num_context_tokens: tokens that those rows attend to, added up.
    """

    num_steps: int
    num_prefill_tokens: int
    num_decode_rows: int
    num_context_tokens: int

    @classmethod
    def of(cls, plan: StepPlan) -> "StepCounts":
        """The counts of a plan."""
        decoding, num_steps = plan.rows[plan.num_prompt_rows :], plan.num_steps
        context_len = sum(row.end for row in decoding)
        return cls.of_decode(len(decoding), context_len, num_steps)._replace(num_prefill_tokens=plan.num_prefill_tokens)

    @classmethod
    def of_decode(cls, num_rows: int, context_len: int, num_steps: int) -> "StepCounts":
        """The counts of steps that attend to `context_len` tokens in the first one, in each later one a token a row
        more."""
        num_context_tokens = num_steps * context_len + num_rows * num_steps * (num_steps - 1) // 2
        return cls(num_steps, 0, num_rows * num_steps, num_context_tokens)


@dataclass(frozen=True)
class CostModel:
    """Seconds of a plan: the sum of these times its counts.

    The defaults are of the order of an 8B model in bfloat16 on one H200, by its data sheet: weights of 16 GB read at
    4 TB/s in every pass, 16 GFLOP a prompt token at 700 TFLOP/s, 128 kB of KV a context token at 4 TB/s. `fit` gives
    those of a real run.

    per_step_s: seconds of a forward pass.
    per_prefill_token_s: seconds of a prompt token computed.
    per_decode_row_s: seconds of a row that computes an output token.
    per_context_token_s: seconds of a token that such a row attends to.

    Raises:
        ValueError: one of them is negative or infinite, or all are 0, so that time would stand still.
    """

    per_step_s: float = 4e-3
    per_prefill_token_s: float = 23e-6
    per_decode_row_s: float = 23e-6
    per_context_token_s: float = 32e-9

    def __post_init__(self) -> None:
        for name in ("per_step_s", "per_prefill_token_s", "per_decode_row_s", "per_context_token_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} is below 0")
            if getattr(self, name) == math.inf:
                raise ValueError(f"{name}=inf would stop the clock; give seconds")
        if not any(astuple(self)):
            raise ValueError("all costs are 0; give one that is above it")

    def seconds_s(self, counts: StepCounts) -> float:
        """Seconds that a plan of these counts takes."""
        return (
            self.per_step_s * counts.num_steps
            + self.per_prefill_token_s * counts.num_prefill_tokens
            + self.per_decode_row_s * counts.num_decode_rows
            + self.per_context_token_s * counts.num_context_tokens
        )

    @classmethod
    def fit(cls, measured: Sequence[tuple[StepCounts, float]]) -> "CostModel":
        """The model with the least sum of squared errors, none of its costs negative.

        measured: counts and seconds of steps that ran, compilation left out.

        Raises:
            ValueError: fewer than four steps, or times that are all 0.
        """
        if len(measured) < 4:
            raise ValueError(f"{len(measured)} steps don't determine four costs; measure more")
        counts = np.array([one for one, _ in measured], np.float64)
        seconds = np.array([seconds_s for _, seconds_s in measured], np.float64)
        return cls(*_non_negative_least_squares(counts, seconds).tolist())


def _non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |matrix x - target|, by trying every set of columns: there are but a few.

    Of the sets whose own least squares are non-negative the best one is the answer, since the problem is convex and the
    answer is the least squares of the columns it uses.
    """
    num_columns = matrix.shape[1]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    best, best_error = np.zeros(num_columns), float(target @ target)
    for chosen in range(1, 1 << num_columns):
        columns = [column for column in range(num_columns) if chosen >> column & 1]
        part, *_ = np.linalg.lstsq(matrix[:, columns] / scale[columns], target, rcond=None)
        if (part < 0).any():
            continue
        error = float(
            ((matrix[:, columns] / scale[columns]) @ part - target)
            @ ((matrix[:, columns] / scale[columns]) @ part - target)
        )
        if error < best_error * (1 - 1e-12):
            best, best_error = np.zeros(num_columns), error
            best[columns] = part / scale[columns]
    return best
