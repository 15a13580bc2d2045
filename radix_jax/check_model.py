"""A model through the invariances of the cache: whatever an engine does to save work, the logits stay the same.

from radix_jax.check_model import check_model
report = check_model(my_module_or_config, my_params)
assert report.passed, report.as_text()
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32

from radix_jax.config import EngineConfig
from radix_jax.engine import Engine
from radix_jax.models.base import ModelParams
from radix_jax.models.layers import dense_causal_attention, linear
from radix_jax.models.registry import family_for_config, params_of
from radix_jax.request import MAX_LOGPROBS, SamplingParams

Status = Literal["ok", "differs", "not reached", "raised"]
CONTEXT_LEN = 96  # of every request, and of the pool: two of the longer ones don't fit together
# Log-probabilities may differ by so much, times the spread of the logits where that is above 1.
_BOUNDS = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
_ACCELERATOR_BOUND = 2e-2  # their matmuls round float32
_NUM_OUTPUTS = 4

HINTS = {
    "causal": "tokens see later ones, or what lies beside them: `forward` may mix tokens through `attend` alone",
    "own forward": "the module's call and the family's `forward` disagree: look at which kv head a query head reads "
    "(n reads n // (N // G)), the scale (head_dim ** -0.5), the mask, the last norm and the head",
    "prefill": "a prompt alone differs from dense attention: look at the attention backend (radix-jax check-kernel), "
    "and at what hangs on the number of tokens or on padding",
    "decode": "prompts are right, and what follows them is not: take places from `positions`, and keep nothing of "
    "earlier tokens but K and V",
    "cache": "what follows a cached prefix differs: take places from `positions`, and keep nothing of earlier "
    "tokens but K and V",
    "chunks": "what follows the first chunk of a prompt differs: as for cache",
    "batch": "requests of one step touch each other: look for means, norms and shifts along the token axis",
    "eviction": "a prefix that is cached in part differs: as for cache",
    "retraction": "outputs that are computed again, as a prompt, differ: as for decode",
    "page size 1": "pages of another size differ: look at the attention backend (radix-jax check-kernel)",
    "page size 4": "pages of another size differ: look at the attention backend (radix-jax check-kernel)",
}


@dataclass(frozen=True)
class CheckResult:
    """One check. largest: the largest difference of log-probabilities, None where there is none to tell. message: what
    was raised or not reached, or what to look at."""

    check: str
    compared: str
    status: Status
    largest: float | None
    bound: float
    message: str = ""


@dataclass(frozen=True)
class ModelReport:
    """A model through all checks, in their order: the first that failed is the one to look at."""

    model: str
    platform: str
    dtype: str
    checks: tuple[CheckResult, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.check for check in self.checks if check.status != "ok")

    @property
    def passed(self) -> bool:
        """Whether all checks are ok."""
        return not self.failed

    def as_dict(self) -> dict[str, Any]:
        """For JSON: an infinite difference becomes the string "inf"."""
        report = {**dataclasses.asdict(self), "passed": self.passed}
        for check in report["checks"]:
            if check["largest"] == float("inf"):
                check["largest"] = "inf"
        return report

    def as_text(self) -> str:
        """A line for each check that failed, and the summary."""
        lines = [f"{check.check}: {check.status}, {check.message}" for check in self.checks if check.status != "ok"]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        """How many are ok, and where to begin."""
        told = f"{self.model} in {self.dtype} on {self.platform}: {len(self.checks) - len(self.failed)} ok"
        return f"{told}, {len(self.failed)} not; begin with {self.failed[0]!r}" if self.failed else told


class _Served(NamedTuple):
    """What a request got: ids, and of each the log-probabilities of it and of the most likely ones."""

    prompt: np.ndarray
    ids: list[int]
    logprobs: list[dict[int, float]]
    cached_len: int


class _NotReached(Exception):
    """A check did not bring about what it is to check."""


def check_model(
    model: Any, params: Any = None, *, name: str = "", on_check: Callable[[CheckResult], None] | None = None
) -> ModelReport:
    """Run a model of a registered family through all checks, on a few random ids.

    model, params: as `Engine` takes them. A module that can be called on ids [T] is compared with that call too.
    on_check: called after each check.

    Raises:
        TypeError, ValueError: as `Engine`, or a context of fewer than 96 tokens.
    """
    model_params = params_of(model, params)
    longest = model_params.config.max_position_embeddings
    if longest < CONTEXT_LEN:
        raise ValueError(f"the model has {longest} positions, the checks take {CONTEXT_LEN}; give it so many")
    own = model if isinstance(model, nnx.Module) and callable(model) else None
    checks = _Checks(model_params, own)
    results = []
    try:
        for check, (compared, run) in checks.all().items():
            results.append(checks.result(check, compared, run))
            if on_check is not None:
                on_check(results[-1])
    finally:
        checks.close()
    return ModelReport(name or type(model).__name__, jax.default_backend(), checks.dtype, tuple(results))


def num_checks(model: Any) -> int:
    """That a model goes through: one less where it has no call of its own."""
    return len(HINTS) - (not (isinstance(model, nnx.Module) and callable(model)))


class _Checks:
    """The checks over one model, and the engine of pages of 16 that most of them share."""

    def __init__(self, params: ModelParams, own: Callable[[jax.Array], jax.Array] | None) -> None:
        self._params = params
        self._own = None if own is None else jax.jit(lambda ids: jax.nn.log_softmax(own(ids).astype(jnp.float32)))
        self._forward = jax.jit(_dense_logits)
        self._engine = self._new_engine(16)
        self._kept: dict[bytes, _Served] = {}
        self.dtype = str(self._engine.config.dtype)
        draw = functools.partial(np.random.default_rng(0).integers, 0, params.config.vocab_size, dtype=np.int32)
        self._short, self._middle, self._long, *self._rivals = map(draw, (5, 30, 72, 50, 50))
        self._branch = np.concatenate([self._middle[:20], draw(8)])
        rate = _BOUNDS.get(self.dtype, _BOUNDS["bfloat16"])
        if jax.default_backend() != "cpu":
            rate = max(rate, _ACCELERATOR_BOUND)
        self._bound = rate * max(1.0, float(self._logits(self._middle)[: len(self._middle)].std(axis=-1).max()))

    def all(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """Name -> (what is compared, the check, which gives the largest difference)."""
        checks: dict[str, tuple[str, Callable[[], float]]] = {
            "causal": ("a sequence, and its first half alone", self._causal),
            "own forward": ("the module's own call, and `forward` with dense attention", self._own_forward),
            "prefill": ("an engine's prompts, and dense attention", self._prefill),
            "decode": ("tokens one by one, and dense attention", self._decode),
            "cache": ("with a cached prefix, and without", self._cache),
            "chunks": ("a prompt in two chunks, and dense attention", self._chunks),
            "batch": ("three requests together, and each alone", self._batch),
            "eviction": ("after a part was evicted, and before", self._eviction),
            "retraction": ("retracted half-way, and not", self._retraction),
            "page size 1": ("pages of 1 token, and of 16", functools.partial(self._pages, 1)),
            "page size 4": ("pages of 4 tokens, and of 16", functools.partial(self._pages, 4)),
        }
        if self._own is None:
            del checks["own forward"]
        return checks

    def result(self, check: str, compared: str, run: Callable[[], float]) -> CheckResult:
        """What a check gives; whatever a foreign model may raise is its result."""
        try:
            largest = run()
        except _NotReached as error:
            return CheckResult(check, compared, "not reached", None, self._bound, str(error))
        except Exception as error:
            told = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
            return CheckResult(check, compared, "raised", None, self._bound, told)
        if largest > self._bound:
            return CheckResult(check, compared, "differs", largest, self._bound, HINTS[check])
        return CheckResult(check, compared, "ok", largest, self._bound)

    def close(self) -> None:
        """Give the memory back."""
        self._engine.close()

    def _causal(self) -> float:
        half = len(self._long) // 2
        return _largest(self._dense(self._long)[:half] - self._dense(self._long[:half])[:half])

    def _own_forward(self) -> float:
        assert self._own is not None
        own = np.asarray(self._own(jnp.asarray(_padded(self._long))))
        return _largest((own - self._dense(self._long))[: len(self._long)])

    def _prefill(self) -> float:
        return max(self._from_dense(self._cold(prompt), slice(1)) for prompt in (self._short, self._middle))

    def _decode(self) -> float:
        return max(self._from_dense(self._cold(prompt), slice(1, None)) for prompt in (self._short, self._middle))

    def _cache(self) -> float:
        self._engine.flush_cache()
        prompts = self._middle, self._middle, self._branch
        served = [self._serve(prompt) for prompt in prompts]
        cached_lens = [each.cached_len for each in served]
        if cached_lens != [0, 29, 20]:
            raise _NotReached(f"{cached_lens} tokens were cached instead of [0, 29, 20]")
        return self._from_cold(served)

    def _chunks(self) -> float:
        before = self._engine.stats().num_prefill_steps
        served = self._cold(self._long)
        if self._engine.stats().num_prefill_steps != before + 2:
            raise _NotReached("the prompt was not computed in two chunks")
        return self._from_dense(served, slice(None))

    def _batch(self) -> float:
        self._engine.flush_cache()
        return self._from_cold(self._serve_all(self._engine, (self._short, self._middle, self._branch)))

    def _eviction(self) -> float:
        self._engine.flush_cache()
        before = self._engine.stats().num_evicted_tokens
        served = [self._serve(prompt) for prompt in (self._middle, self._long, self._middle)]
        if self._engine.stats().num_evicted_tokens == before:
            raise _NotReached("nothing was evicted")
        return self._from_cold(served)

    def _retraction(self) -> float:
        self._engine.flush_cache()
        before = self._engine.stats().num_retractions
        served = self._serve_all(self._engine, self._rivals, one_after_the_other=True)
        if self._engine.stats().num_retractions == before:
            raise _NotReached("no request was retracted")
        return self._from_cold(served)

    def _pages(self, page_size: int) -> float:
        engine, prompts = self._new_engine(page_size), (self._short, self._branch, self._middle)
        try:
            cold, warm = self._serve_all(engine, prompts), self._serve_all(engine, prompts)
        finally:
            engine.close()
        return self._from_cold([*cold, *warm])

    def _new_engine(self, page_size: int) -> Engine:
        config = EngineConfig(
            page_size=page_size,
            num_pages=CONTEXT_LEN // page_size + 1,
            max_model_len=CONTEXT_LEN,
            max_running_requests=4,
            max_prefill_tokens=64,
            eviction_policy="lru",
        )
        return Engine(self._params.config, self._params, config)

    def _cold(self, prompt: np.ndarray) -> _Served:
        """A prompt alone, with nothing cached."""
        key = prompt.tobytes()
        if key not in self._kept:
            self._engine.flush_cache()
            self._kept[key] = self._serve(prompt)
        return self._kept[key]

    def _from_cold(self, served: Sequence[_Served]) -> float:
        """How far these are from the same prompts alone, with nothing cached."""
        return max(_difference(self._cold(each.prompt), each) for each in served)

    def _serve(self, prompt: np.ndarray) -> _Served:
        return self._serve_all(self._engine, [prompt])[0]

    def _serve_all(
        self, engine: Engine, prompts: Sequence[np.ndarray], *, one_after_the_other: bool = False
    ) -> list[_Served]:
        """Requests to their ends. one_after_the_other: each comes when the one before has two tokens, and goes before
        it."""
        asked = SamplingParams(temperature=0, max_tokens=_NUM_OUTPUTS, logprobs=MAX_LOGPROBS)
        last: dict[str, Any] = {}

        def step(until: Callable[[], bool]) -> None:
            while not until():
                last.update({output.request_id: output for output in engine.step()})

        request_ids = []
        for priority, prompt in enumerate(prompts):
            request_id = engine.add_request(prompt, asked, priority=priority if one_after_the_other else 0)
            request_ids.append(request_id)
            if one_after_the_other and priority + 1 < len(prompts):
                step(lambda: request_id in last and len(last[request_id].outputs[0].token_ids) > 1)  # noqa: B023
        step(lambda: not engine.has_unfinished())
        return [_served(prompt, last[request_id]) for prompt, request_id in zip(prompts, request_ids, strict=True)]

    def _from_dense(self, served: _Served, places: slice) -> float:
        """How far the log-probabilities at some places of an output are from those of dense attention."""
        dense = self._dense(np.concatenate([served.prompt, np.array(served.ids, np.int32)]))
        rows = range(len(served.prompt) - 1, len(served.prompt) - 1 + len(served.ids))[places]
        told = zip(rows, served.logprobs[places], strict=True)
        return _largest(np.array([logprob - dense[row, i] for row, tokens in told for i, logprob in tokens.items()]))

    def _dense(self, ids: np.ndarray) -> Float32[np.ndarray, "T V"]:
        """Log-probabilities of what follows each place, padding included."""
        return np.asarray(jax.nn.log_softmax(self._logits(ids)))

    def _logits(self, ids: np.ndarray) -> Float32[jax.Array, "T V"]:
        return self._forward(self._params, jnp.asarray(_padded(ids)))


def _dense_logits(params: ModelParams, ids: jax.Array) -> jax.Array:
    config, weights = params.config, params.weights

    def attend(kv: None, _: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[None, jax.Array]:
        return kv, dense_causal_attention(q, k, v)

    positions = jnp.arange(len(ids), dtype=jnp.int32)
    _, hidden = family_for_config(config).forward(weights, config, ids, positions, None, attend)
    return linear(hidden, weights["embed"].T if params.head is None else params.head)


def _padded(ids: np.ndarray) -> np.ndarray:
    return np.pad(ids, (0, CONTEXT_LEN - len(ids)))


def _served(prompt: np.ndarray, output: Any) -> _Served:
    [completion] = output.outputs
    logprobs = [{token: each.logprob for token, each in tokens.items()} for tokens in completion.logprobs]
    return _Served(prompt, completion.token_ids, logprobs, output.cached_tokens)


def _difference(one: _Served, other: _Served) -> float:
    """The largest difference of log-probabilities of tokens that both tell of, as far as both have the same context.
    Where the ids part, they are no further apart than that."""
    largest = 0.0
    for ours, theirs, id_, other_id in zip(one.logprobs, other.logprobs, one.ids, other.ids, strict=True):
        if id_ not in theirs or other_id not in ours:
            return float("inf")
        largest = max(
            largest, _largest(np.array([ours[token] - theirs[token] for token in ours.keys() & theirs.keys()]))
        )
        if id_ != other_id:
            break
    return largest


def _largest(differences: np.ndarray) -> float:
    """The largest of them; what is no number is as far off as can be."""
    return float(np.nan_to_num(np.abs(differences), nan=np.inf, posinf=np.inf).max())
