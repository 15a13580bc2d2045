"""StepPlan: all that the scheduler and the runner share. Plain data, never jax."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from radix_jax.request import Request

StepKind = Literal["prefill", "decode", "mixed"]
BucketKind = Literal["prefill", "decode", "copy", "sampler", "read", "write"]
MIN_ROWS = 8
MIN_PREFILL_TOKENS = 64
_NO_IDS = np.empty(0, np.int32)


def row_counts(max_running_requests: int) -> list[int]:
    """Rows that steps are padded to: 8, 16, 32, ... up to max_running_requests rounded up."""
    return _doublings(MIN_ROWS, max_running_requests)


def token_counts(max_prefill_tokens: int) -> list[int]:
    """Tokens that prefill steps are padded to: 64, 128, 256, ... up to max_prefill_tokens rounded up."""
    return _doublings(MIN_PREFILL_TOKENS, max_prefill_tokens)


def _doublings(first: int, limit: int) -> list[int]:
    values = [first]
    while values[-1] < limit:
        values.append(2 * values[-1])
    return values


@dataclass(frozen=True)
class Bucket:
    """The padded shape of a step, or of what comes in front of it: one compiled program a bucket.

    num_tokens: T, num_rows: B, num_pages: P, page-table entries a row. Copies: one page a row, no token computed.
    Sampler: the sampler's row of one request is filled. Read, write: so many pages are carried out of the pool, or in.
    """

    kind: BucketKind
    num_tokens: int
    num_rows: int
    num_pages: int

    @property
    def copies(self) -> "Bucket":
        """The bucket of the copies that a step of this one begins with."""
        return Bucket("copy", 0, self.num_rows, 1)


@dataclass(frozen=True)
class PageCopy:
    """KV to copy before a step: the first `num_tokens` tokens of page `source`, which is cached, to page `target`.

    `target` is a fresh page of one row. What the copy writes behind num_tokens is undefined; the step overwrites it or
    nobody reads it.
    """

    source: int
    target: int
    num_tokens: int


class StepRow(NamedTuple):
    """One request's share of a step: tokens [start, start + len(token_ids)) of its prompt + output.

    pages: page ids that cover [0, end), and more in a plan of several steps.
    samples: the row's last token yields a new one (decode, or the last chunk).
    source: the row of the plan before whose new token is this row's only one, while the host does not know it yet;
        token_ids is 0 there. None: token_ids counts.
    copy: where the tokens in front of `start`, back to the start of its page, come from; None where they are in place.
    seat: number that the request has to itself while it runs.
    output_ids: of a row that ends a prompt, what was generated before it; empty unless the request was retracted.
    num_prompt_logprobs: as SamplingParams.prompt_logprobs, of the prompt's tokens behind each of the row's; -1: none.

    A tuple because a step makes many of them; two rows are equal only if they are one.
    """

    request: Request
    token_ids: Int32[np.ndarray, " T"]
    start: int
    pages: Int32[np.ndarray, " P"]
    samples: bool
    source: int | None = None
    copy: PageCopy | None = None
    seat: int = 0
    output_ids: Int32[np.ndarray, " T"] = _NO_IDS
    num_prompt_logprobs: int = -1

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

    @property
    def end(self) -> int:
        """Tokens whose KV is in the pool after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Rows of one step and the bucket they are padded to.

    kind: "mixed" has rows of both kinds, and the bucket of a prefill step.
    num_prompt_rows: rows [0, num_prompt_rows) compute prompts, those behind them decode.
    num_steps: above 1 only for "decode": so many steps in a row, each of one token a row, with pages for all of them.
    """

    kind: StepKind
    rows: tuple[StepRow, ...]
    bucket: Bucket
    num_prompt_rows: int
    num_steps: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding not counted."""
        return self.num_prefill_tokens + (len(self.rows) - self.num_prompt_rows) * self.num_steps

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens computed in rows that do not decode."""
        return sum(len(row.token_ids) for row in self.rows[: self.num_prompt_rows])

    @property
    def samples(self) -> bool:
        """Whether any row yields a token."""
        return len(self.rows) > self.num_prompt_rows or any(row.samples for row in self.rows)

    @property
    def asks_prompt_logprobs(self) -> bool:
        """Whether any row asks for log-probabilities of its prompt."""
        return any(row.num_prompt_logprobs >= 0 for row in self.rows[: self.num_prompt_rows])

    @property
    def copies(self) -> tuple[PageCopy, ...]:
        """What is copied before anything is computed, at most one page a row."""
        return tuple(row.copy for row in self.rows[: self.num_prompt_rows] if row.copy is not None)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the tokens that a step samples: on the device first, then numpy. Zeros where no row asks.

    sampled: of each row's token, by the raw logits. rank: how many tokens are as likely as it or more so.
    sampling: of the token by what it was drawn from, after penalties, temperature and filters; 0 for a greedy row.
    top_ids, top: the most likely tokens by the raw logits, best first.
    """

    sampled: Float32[Any, " B"]
    rank: Int32[Any, " B"]
    sampling: Float32[Any, " B"]
    top_ids: Int32[Any, "B top"]
    top: Float32[Any, "B top"]


class PromptLogprobs(NamedTuple):
    """What the raw logits of each token of a prefill step say of the token behind it in its prompt: on the device
    first, then numpy. Undefined where no row asks.

    rank: how many tokens are as likely as it or more so. top_ids, top: the most likely tokens, best first.
    """

    logprob: Float32[Any, " T"]
    rank: Int32[Any, " T"]
    top_ids: Int32[Any, "T top"]
    top: Float32[Any, "T top"]
