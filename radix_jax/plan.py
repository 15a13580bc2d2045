"""StepPlan: all that the scheduler and the runner share. Plain data, never jax."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int32

from radix_jax.request import Request

StepKind = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Bucket:
    """The padded shape of a step: one compiled program a bucket.

    num_tokens: T, num_rows: B, num_pages: P, page-table entries a row.
    """

    kind: StepKind
    num_tokens: int
    num_rows: int
    num_pages: int


@dataclass(frozen=True, eq=False)
class StepRow:
    """One request's share of a step: tokens [start, start + len(token_ids)) of its prompt + output.

    pages: page ids that cover [0, end). samples: the row's last token yields a new one (decode, or the last chunk).
    """

    request: Request
    token_ids: Int32[np.ndarray, " T"]
    start: int
    pages: Int32[np.ndarray, " P"]
    samples: bool

    @property
    def end(self) -> int:
        """Tokens whose KV is in the pool after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Rows of one step and the bucket they are padded to."""

    kind: StepKind
    rows: tuple[StepRow, ...]
    bucket: Bucket

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding not counted."""
        return sum(len(row.token_ids) for row in self.rows)
