"""RequestState: what the scheduler keeps of one sample of a request, from its arrival to its end."""

import logging
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.handles import PrefixHandle
from radix_jax.cache.keys import namespace_key, of_weights
from radix_jax.plan import PageCopy
from radix_jax.request import CacheMode, FinishAt, FinishReason, Request
from radix_jax.scheduler.output_logprobs import OutputLogprobs
from radix_jax.scheduler.prompt_logprobs import PromptEntries

_LOG = logging.getLogger("radix_jax")


def num_pages_for(prompt_len: int, max_tokens: int, page_size: int) -> int:
    """Pages that a request fills at most. Nobody attends to its last output token, so that one needs no KV."""
    return -(-(prompt_len + max_tokens - 1) // page_size)


def _no_logprobs(request: Request) -> OutputLogprobs | None:
    """Where the log-probabilities of its outputs go; None if nobody asked."""
    num_logprobs = request.sampling.logprobs
    return None if num_logprobs is None else OutputLogprobs(num_logprobs)


def _no_prompt_logprobs(request: Request) -> PromptEntries | None:
    """Where those of its prompt go; sample 0 has them for all."""
    num_top = None if request.sample_index else request.sampling.prompt_logprobs
    return None if num_top is None else PromptEntries(request.token_ids, num_top)


class Ticket(NamedTuple):
    """When a request came, in passes and in prompt tokens that the scheduler had computed."""

    joined_pass: int
    num_prefill_tokens: int


class SampleGroup:
    """What the samples of one request have in common: the pages that they share, and the time that they are timed by.

    mode: how they use the cache; "off" where there is none.

    namespace: that their KV is looked for in, and goes to: None as a Request has it, or one that nobody else can have.
    is_private: it is one of those, since what the samples compute must serve nobody else.
    reads, writes: whether they look there, and whether their pages go there.
    computed_version: of the weights that their prompt was last computed anew by, so that even those that write alone
        may share it; None before.
    copies: whether parts of cached pages serve them. keeps_tails: whether their own partial pages are kept.
    num_unfinished: samples that wait or run.
    cached_len: prompt tokens that the cache held when the first of them was admitted, copied ones included; None
        before, and once more where new weights made them start anew.
    admitted_s: the caller's clock at the first admission; None before.
    """

    __slots__ = (
        "admitted_s",
        "cached_len",
        "computed_version",
        "copies",
        "is_private",
        "keeps_tails",
        "namespace",
        "num_unfinished",
        "reads",
        "writes",
    )

    def __init__(self, namespace: Hashable, *, mode: CacheMode = "use", num_samples: int = 1):
        self.is_private = mode == "off" and num_samples > 1
        self.namespace: Hashable = object() if self.is_private else namespace
        self.reads = self.is_private or mode in ("use", "read")
        self.writes = self.is_private or mode in ("use", "write")
        self.computed_version: int | None = None
        self.copies = mode in ("use", "read")
        self.keeps_tails = mode in ("use", "write")
        self.num_unfinished = num_samples
        self.cached_len: int | None = None
        self.admitted_s: float | None = None


class RequestState:
    """Progress of one sample. Only the scheduler changes it; others read.

    tokens: int32 [prompt_len + max_tokens], the prompt and behind it the output; num_tokens of them are known.
    num_computed: tokens whose KV is in the pool once the steps planned so far have run.
    num_pending: tokens that planned steps sample and that the host does not know yet.
    pages: page table, the pages that hold this request's tokens, from its first one on; num_pages of them. The array
        itself never changes: plans hold it.
    source: the row of the last plan that samples the pending token.
    seat: number that it has to itself while it runs.
    group: what it shares with the other samples of its request; of its own by default.
    shares: it may use the cache as its group does: what it has computed is of the weights of now.
    namespace, namespace_key: that it shares in: of the group and of weight_version.
    weight_version: of the weights that it was last let in under; its KV is of no earlier ones.
    version_starts: (place of an output token, version of the weights that sampled it and those behind it), in order.
    handle: the locked prefix in the tree, None while waiting; pages of its handle.cached_len tokens are the tree's.
    last_handle: of the last match, to match from again; None before the first.
    copy: what the request's next row begins with, until that row is planned.
    num_retractions: times that its pages were taken away.
    logprobs: of the output tokens; None where nobody asked.
    prompt_logprobs: of the prompt, for the first sample of a request that asked; else None.
    ticket: when it came, as the waiting queue counts; keeps its seniority through retractions.
    queued_s: the caller's clock on arrival.
    finish_reason, stop_reason: None while unfinished; stop_reason is the id that stopped the request or what its
        finish_check gave, or which time-out or error ended it.
    """

    __slots__ = (
        "_page_buffer",
        "copy",
        "finish_reason",
        "group",
        "handle",
        "last_handle",
        "logprobs",
        "namespace",
        "namespace_key",
        "num_computed",
        "num_pages",
        "num_pending",
        "num_retractions",
        "num_tokens",
        "pages",
        "prompt_logprobs",
        "queued_s",
        "request",
        "seat",
        "shares",
        "source",
        "stop_reason",
        "ticket",
        "tokens",
        "version_starts",
        "weight_version",
    )

    def __init__(
        self,
        request: Request,
        page_size: int,
        now: float = 0.0,
        group: SampleGroup | None = None,
        weight_version: int = 0,
    ):
        max_len = request.prompt_len + request.max_tokens
        max_pages = num_pages_for(request.prompt_len, request.max_tokens, page_size)
        self.request = request
        self.group = group or SampleGroup(request.namespace)
        self.version_starts: tuple[tuple[int, int], ...] = ((0, weight_version),)
        self.tokens: Int32[np.ndarray, " S"] = np.empty(max_len, np.int32)
        self.tokens[: request.prompt_len] = request.token_ids
        self.num_tokens: int = request.prompt_len
        self.num_computed: int = 0
        self.num_pending: int = 0
        self.source: int = 0
        self.seat: int = 0
        self._page_buffer: Int32[np.ndarray, " P"] = np.empty(max_pages, np.int32)  # never changed below num_pages
        self.pages: Int32[np.ndarray, " P"] = self._page_buffer[:0]
        self.num_pages: int = 0
        self.handle: PrefixHandle | None = None
        self.renew_sharing(weight_version)
        self.copy: PageCopy | None = None
        self.num_retractions: int = 0
        self.logprobs: OutputLogprobs | None = _no_logprobs(request)
        self.ticket: Ticket | None = None
        self.queued_s: float = now
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def cached_len(self) -> int:
        """Prompt tokens that the cache held when the first sample of the request was admitted; 0 before it."""
        return self.group.cached_len or 0

    @property
    def prompt(self) -> Int32[np.ndarray, " T"]:
        """Ids of the prompt."""
        return self.tokens[: self.request.prompt_len]

    @property
    def known(self) -> Int32[np.ndarray, " T"]:
        """Ids of the prompt and of what was generated so far: what has to be computed before the next token."""
        return self.tokens[: self.num_tokens]

    @property
    def output_ids(self) -> Int32[np.ndarray, " T"]:
        """Ids generated so far."""
        return self.tokens[self.request.prompt_len : self.num_tokens]

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.request.prompt_len

    @property
    def reads(self) -> bool:
        """Whether what is cached serves it."""
        group = self.group
        return self.shares and (group.reads or group.computed_version == self.weight_version)

    @property
    def writes(self) -> bool:
        """Whether what it computes is cached."""
        return self.shares and self.group.writes

    @property
    def keeps_tails(self) -> bool:
        """Whether its partial page is kept when it leaves."""
        return self.shares and self.group.keeps_tails

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are asked for and not all known."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete

    @property
    def num_to_sample(self) -> int:
        """Tokens that may still be sampled, by steps that are not planned yet."""
        return len(self.tokens) - self.num_tokens - self.num_pending

    @property
    def max_pages(self) -> int:
        """Pages that the request fills at most."""
        return len(self._page_buffer)

    def append_pages(self, pages: Int32[np.ndarray, " P"]) -> None:
        """Extend the page table."""
        end = self.num_pages + len(pages)
        self._page_buffer[self.num_pages : end] = pages
        self.pages, self.num_pages = self._page_buffer[:end], end

    def replace_pages(self, pages: Int32[np.ndarray, " P"]) -> None:
        """Name other pages that hold the same KV, as many as before."""
        num_pages = self.num_pages
        self._forget_pages()
        self.append_pages(pages[:num_pages])

    def drop_pages(self) -> None:
        """Forget pages and handle: they were given back."""
        self._forget_pages()
        self.num_computed = 0
        self.handle = self.copy = None

    def renew_sharing(self, weight_version: int) -> None:
        """Nothing of it is in the pool: these weights compute all of it from its next admission on, and it shares with
        those that they compute."""
        self.weight_version: int = weight_version
        self.namespace: Hashable = of_weights(self.group.namespace, weight_version)
        self.namespace_key: Hashable = namespace_key(self.namespace)
        self.shares: bool = True
        self.last_handle: PrefixHandle | None = None
        self.prompt_logprobs: PromptEntries | None = _no_prompt_logprobs(self.request)

    def note_version(self, weight_version: int) -> None:
        """Weights of this version sample the output tokens from here on."""
        before = self.version_starts
        if before[-1][0] == self.num_outputs:
            before = before[:-1]
        self.version_starts = (*before, (self.num_outputs, weight_version))

    def drop_outputs(self) -> None:
        """Start anew with the prompt; nothing of it is in the pool."""
        self.num_tokens = self.request.prompt_len
        self.logprobs = _no_logprobs(self.request)
        self.version_starts = self.version_starts[:1]
        self.group.cached_len = None

    def append_tokens(self, token_ids: list[int]) -> int:
        """Append generated tokens up to the one that ends the sample, if one does; returns how many."""
        num_before = self.num_tokens
        for token_id in token_ids:
            self.append_token(token_id)
            if self.finish_reason is not None:
                break
        if self.request.finish_check is not None:
            self._ask(token_ids[: self.num_tokens - num_before])
        return self.num_tokens - num_before

    def append_token(self, token_id: int) -> None:
        """Append a generated token; finish where it is a stop id or the last one allowed."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if token_id in self.request.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self.num_tokens == len(self.tokens):
            self.finish_reason = "length"

    def _ask(self, new_ids: list[int]) -> None:
        """Let the request's own check end the sample; what it raises ends it too."""
        check, num_new = self.request.finish_check, len(new_ids)
        assert check is not None
        try:
            finish = check(self.request.sample_index, new_ids)
            if finish is not None and not (isinstance(finish, FinishAt) and 0 < finish.num_ids <= num_new):
                raise ValueError(f"{finish!r} for {num_new} new ids; give FinishAt(1..{num_new}, reason), or None")
        except Exception as error:
            _LOG.exception("the finish_check of request %s failed, which ends it", self.request_id)
            self.finish_reason, self.stop_reason = "abort", f"finish_check: {type(error).__name__}: {error}"
            return
        if finish is None or (finish.num_ids == num_new and self.finish_reason == "stop"):
            return
        self.num_tokens -= num_new - finish.num_ids
        self.finish_reason, self.stop_reason = "stop", finish.stop_reason

    def _forget_pages(self) -> None:
        self._page_buffer = np.empty(self.max_pages, np.int32)
        self.pages, self.num_pages = self._page_buffer[:0], 0
