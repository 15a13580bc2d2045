"""What a caller sends and gets back: SamplingParams, Request, RequestOutput, CompletionOutput, Logprob."""

import json
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from radix_jax.config import check_int

FinishReason = Literal["stop", "length", "abort"]
CacheMode = Literal["use", "off", "read", "write"]
CACHE_MODES: tuple[CacheMode, ...] = get_args(CacheMode)
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0


class FinishAt(NamedTuple):
    """Where a FinishCheck ends a sample: after the first `num_ids` of its new ids, at least 1, for `stop_reason`."""

    num_ids: int
    stop_reason: int | str


FinishCheck = Callable[[int, list[int]], FinishAt | None]
"""`finish_check(index, new_ids)` is told the ids that sample `index` of a request got, each once and in order, and says
where they end it; None: they do not. What it raises ends that sample alone, with "abort" and the error as stop_reason.
"""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. The defaults are those of vLLM.

    n: samples of the prompt, each an output of its own, greedy ones alike; their prompt is computed once.
    temperature: 0 is greedy; else logits are divided by it.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
    min_p: drop tokens less likely than min_p times the most likely one.
    max_tokens: output tokens at most; None is up to the context.
    min_tokens: output tokens at least: before them no id that would end the request is chosen, and no stop string
        counts.
    stop: strings of which the first to be complete in the text ends it, in front of that string; for LLM, which knows
        text. Of those complete at the same character the one listed first counts. The ids keep the token that did it.
    include_stop_str_in_output: the text keeps the stop string.
    stop_token_ids: ids that end the request besides the model's end-of-sequence ids.
    ignore_eos: the model's end-of-sequence ids do not end the request.
    seed: with (sample index, position) it is the only source of randomness; None draws one from the engine's seed.
    repetition_penalty: logits of tokens in prompt and output are divided by it where positive, else multiplied (Keskar
        et al. 2019); above 1 discourages.
    frequency_penalty, presence_penalty: times its count in the output, and once if it is there, taken from a token's
        logit.
    logit_bias: token id -> what is added to its logit, at most 100 either way.
    logprobs: log-probabilities of each output token and of so many most likely ones, at most 20, by the model's own
        logits, before all of the above; 0: of the output token alone. None: none.
    prompt_logprobs: as logprobs, of each prompt token but the first. What the cache holds of a prompt then helps as far
        as its log-probabilities were asked for before.

    Raises:
        ValueError: a value out of its range, with the rule and the value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_int("n", self.n, at_least=1)
        _check_float("temperature", self.temperature, low=0.0, high=math.inf)
        _check_float("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p=0.0 keeps no token; use a value in (0, 1], or temperature=0 for greedy")
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        check_int("top_k", self.top_k, at_least=-1)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, at_least=1)
        if self.seed is not None:
            check_int("seed", self.seed, at_least=0)
            if self.seed >= 2**63:
                raise ValueError(f"seed={self.seed} is above its largest value {2**63 - 1}")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a bool")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_id_tuple(self.stop_token_ids))
        check_int("min_tokens", self.min_tokens, at_least=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it")
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_float("repetition_penalty", self.repetition_penalty, low=0.0, high=math.inf)
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty=0.0 divides by zero; use a value above 0, 1 for none")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        for name in ("logprobs", "prompt_logprobs"):
            num = getattr(self, name)
            if num is not None:
                check_int(name, num, at_least=0)
                if num > MAX_LOGPROBS:
                    raise ValueError(f"{name}={num} is above its largest value {MAX_LOGPROBS}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One sample of a request as the scheduler takes it: checked, ids as int32, every default resolved.

    request_id: of the sample. Sample 0 bears the id of the caller's request, the others that id, a dot and their index.
    sample_index: which of `sampling.n`; with seed and position it makes the random keys.
    token_ids: int32 [prompt_len], at least one.
    max_tokens: output tokens at most, so that prompt + output fits the context.
    stop_ids: ids that end the request ("stop"): the model's end-of-sequence ids unless ignored, and stop_token_ids.
    seed: resolved seed of the request's random keys.
    finish_check: may end the sample, beside `stop_ids` and the length; at the same token a stop id comes first.
    arrival: rises by one with each request of an engine; its samples share it.
    namespace: KV is shared only inside one namespace; any hashable value.
    cache: whether what is cached serves it ("use", "read"), and whether what it computes is cached ("use", "write").
        The samples of a request share what they compute, but for "read".
    priority: higher ones go first. routing_key: of requests that like to run together; any hashable value.
    needs_values: the step after a token of this request is planned only once that token's value is known.
    """

    request_id: str
    token_ids: np.ndarray
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    arrival: int
    sample_index: int = 0
    finish_check: FinishCheck | None = None
    namespace: Hashable = None
    cache: CacheMode = "use"
    priority: int = 0
    routing_key: Hashable = None
    needs_values: bool = False

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties or bias change its logits, for as long as it runs."""
        params = self.sampling
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        return bool(params.logit_bias) or penalties != (0.0, 0.0, 1.0)

    @property
    def min_len(self) -> int:
        """Prompt and output tokens that come before any stop id may; 0 where one may come at once."""
        return self.prompt_len + self.sampling.min_tokens if self.sampling.min_tokens and self.stop_ids else 0


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was by the model's own logits.

    logprob: natural logarithm of its probability. rank: 1 is the most likely token. decoded_token: its text, None where
    no tokenizer is at hand (Engine).
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One completion of a request; `token_ids` and `text` are cumulative.

    index: sample index. text: decoded `token_ids`, up to a stop string; "" where no tokenizer is at hand (Engine).
    finish_reason: None while running, then "stop" | "length" | "abort". stop_reason: the id or the string that stopped
        it, or the time-out or error that did.
    logprobs: for each output token, token id -> Logprob: the output token first, then the most likely ones, best
        first. cumulative_logprob: the sum over the output tokens. sampling_logprobs: for each output token its
        log-probability in what it was drawn from, after penalties, temperature and filters; 0.0 where greedy. All None
        unless SamplingParams.logprobs asks for them.
    version_starts: (place of an output token, version of the weights that sampled it and those behind it), in order;
        `weight_versions` has it a token.
    """

    index: int
    token_ids: list[int]
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    sampling_logprobs: list[float] | None = None
    version_starts: tuple[tuple[int, int], ...] = ((0, 0),)

    @property
    def weight_versions(self) -> list[int]:
        """For each output token the `Engine.weight_version` of the weights that sampled it."""
        versions: list[int] = []
        ends = [start for start, _ in self.version_starts[1:]] + [len(self.token_ids)]
        for (start, version), end in zip(self.version_starts, ends, strict=True):
            versions += [version] * (end - start)
        return versions


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """State of one request after a step.

    cached_tokens: prompt tokens served from the cache when the first of its samples was admitted.
    outputs: one CompletionOutput a sample, by index, cumulative; empty when `error` is set.
    finished: all samples ended.
    error: why the request was refused, None for a request that ran.
    prompt_logprobs: an entry a prompt token, None for the first one: token id -> Logprob, the prompt's own token first,
        then the most likely ones, best first. None unless SamplingParams.prompt_logprobs asks, and until the prompt is
        computed.
    """

    request_id: str
    prompt_token_ids: list[int]
    cached_tokens: int
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt: str | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRequest:
    """One request as it happened: a line of a recording, which an engine writes and a replay reads. Each sample of a
    request is one.

    arrival_s: seconds since the recording began. token_ids, output_ids: int32, the prompt and what was generated.
    namespace: None, a bool, number or string, or a tuple of such.
    """

    arrival_s: float
    token_ids: np.ndarray
    output_ids: np.ndarray
    max_tokens: int
    namespace: Hashable = None
    priority: int = 0

    def to_json(self) -> str:
        """One line of JSON.

        Raises:
            TypeError: JSON has no form for the namespace.
        """
        fields = {
            "arrival_s": self.arrival_s,
            "token_ids": self.token_ids.tolist(),
            "output_ids": self.output_ids.tolist(),
            "max_tokens": self.max_tokens,
            "namespace": self.namespace,
            "priority": self.priority,
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "RecordedRequest":
        """The request of a line that `to_json` wrote.

        Raises:
            ValueError: no JSON object, a field that is missing, unknown or of another type, or no prompt.
        """
        fields: Any = json.loads(line)
        names = ("arrival_s", "token_ids", "output_ids", "max_tokens", "namespace", "priority")
        if not isinstance(fields, dict) or fields.keys() != set(names):
            raise ValueError(f"a recorded request has the fields {', '.join(names)}")
        _check_float("arrival_s", fields["arrival_s"], low=0.0, high=math.inf)
        check_int("max_tokens", fields["max_tokens"], at_least=1)
        check_int("priority", fields["priority"], at_least=-(2**63))
        for name in ("token_ids", "output_ids"):
            fields[name] = _recorded_ids(name, fields[name])
        if not len(fields["token_ids"]):
            raise ValueError("token_ids is empty; a request has a prompt")
        fields["namespace"] = namespace_of_json(fields["namespace"])
        return cls(**fields)


def _check_float(name: str, value: object, *, low: float, high: float) -> None:
    # Not by `math.isfinite`, which fails for an int that no float can hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name}={value!r} is not a finite number")
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is outside [{low}, {high}]")


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else tuple(stop)
    for string in strings:
        if not isinstance(string, str):
            raise ValueError(f"stop entry {string!r} is not a str")
        if not string:
            raise ValueError("a stop string is empty, which every text begins with; leave it out")
    return strings


def _token_id_tuple(ids: Sequence[int] | None) -> tuple[int, ...]:
    token_ids = () if ids is None else tuple(ids)
    for token_id in token_ids:
        check_int("stop_token_ids entry", token_id, at_least=0)
    return token_ids


def _checked_bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    """A copy, so that nobody changes it later; None if there is none."""
    if not bias:
        return None
    for token_id, value in bias.items():
        check_int("logit_bias id", token_id, at_least=0)
        _check_float(f"logit_bias of {token_id}", value, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)
    return dict(bias)


def _recorded_ids(name: str, ids: object) -> np.ndarray:
    if not isinstance(ids, list):
        raise ValueError(f"{name}={ids!r} is not a list of token ids")
    for token_id in ids:
        check_int(f"{name} entry", token_id, at_least=0)
    if max(ids, default=0) >= 2**31:
        raise ValueError(f"{name} entry {max(ids)} is no int32")
    return np.array(ids, np.int32)


def namespace_of_json(value: object) -> Hashable:
    """A namespace as it was before JSON made lists of its tuples.

    Raises:
        ValueError: an object, which no namespace becomes.
    """
    if isinstance(value, list):
        return tuple(map(namespace_of_json, value))
    if isinstance(value, dict):
        raise ValueError(f"namespace {value!r} is an object; it is a bool, number or string, or a list of such")
    return value  # type: ignore[return-value]
