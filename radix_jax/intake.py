"""From what a caller gives to a Request: checked ids, and every default resolved."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.keys import namespace_key
from radix_jax.config import EngineConfig
from radix_jax.request import CACHE_MODES, CacheMode, Request, SamplingParams

TokenIds = Sequence[int] | np.ndarray


def checked_ids(token_ids: Any, vocab_size: int, max_model_len: int) -> Int32[np.ndarray, " T"]:
    """`token_ids` as int32 of their own.

    Raises:
        TypeError: they are no flat sequence of ints.
        ValueError: none, ids outside the vocabulary, or so many that the context has no room for an output token.
    """
    if isinstance(token_ids, str):
        raise TypeError("the engine takes token ids, not text; encode it, or use LLM")
    if isinstance(token_ids, Sequence) and any(isinstance(token_id, bool | np.bool_) for token_id in token_ids):
        raise TypeError(f"prompt token ids must be ints, got a bool in {token_ids!r}")
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise TypeError("prompt token ids must be a flat sequence of ints, got sequences of several lengths") from error
    if ids.size == 0:
        raise ValueError("empty prompt: a request needs at least 1 token; if text was given, the tokenizer made none")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"prompt token ids must be a flat sequence of ints, got shape {ids.shape} of {ids.dtype}")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(f"prompt token id {ids[at]} at place {at} is outside the vocabulary [0, {vocab_size})")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"prompt of {len(ids)} tokens exceeds max_model_len={max_model_len}, which holds at least one output token "
            "too; raise max_model_len or shorten it"
        )
    return ids.astype(np.int32)


def checked_sampling(sampling: Any, finish_check: Any, vocab_size: int) -> SamplingParams:
    """`sampling`, or its defaults, with all that can be known of it before a request is made.

    Raises:
        TypeError: no SamplingParams, or as `_check_finish`. ValueError: as `_check_finish` and `_check_bias`.
    """
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling is a {type(sampling).__name__}; give SamplingParams, or None for its defaults")
    sampling = sampling or SamplingParams()
    _check_finish(sampling, finish_check)
    _check_bias(sampling, vocab_size)
    return sampling


def _check_bias(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse a bias of tokens that the model does not have.

    Raises:
        ValueError: such an id, and the vocabulary.
    """
    highest = max(sampling.logit_bias or (0,))
    if highest >= vocab_size:
        raise ValueError(f"logit_bias id {highest} is outside the vocabulary [0, {vocab_size})")


def check_labels(namespace: Any, priority: Any, routing_key: Any) -> None:
    """Refuse what would make the bookkeeping fail half-way.

    Raises:
        TypeError: priority is no int, or namespace or routing_key are not hashable.
        ValueError: priority takes more than 64 bits. Exception: what the namespace itself raises.
    """
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority={priority!r} is not an int")
    if not -(2**63) <= priority < 2**63:
        raise ValueError("priority is outside [-2**63, 2**63)")
    hash(routing_key)
    namespace_key(namespace)


def checked_mode(cache: Any) -> CacheMode:
    """`cache` as one of the four.

    Raises:
        ValueError: it is none of them.
    """
    if cache not in CACHE_MODES:
        raise ValueError(f"cache={cache!r} is not one of {', '.join(map(repr, CACHE_MODES))}")
    return cache


def _check_finish(sampling: SamplingParams, finish_check: Any) -> None:
    """Refuse what could not end a request as asked.

    Raises:
        TypeError: the check can't be called. ValueError: stop strings, and no check that looks for them.
    """
    if finish_check is not None and not callable(finish_check):
        raise TypeError(
            f"finish_check is a {type(finish_check).__name__}; give a function of (index, new ids), or None"
        )
    if sampling.stop and finish_check is None:
        raise ValueError(
            f"stop={sampling.stop!r}: the engine knows ids and no text, so it can't look for strings; use LLM, or give "
            "a finish_check that does"
        )


class Intake:
    """Makes the requests of one engine.

    config: with all that was left open filled in. eos_token_ids: ids that end a request unless it ignores them.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        assert config.max_model_len is not None
        assert config.num_pages is not None
        self.eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._max_len = config.max_model_len
        self._pool_len = (config.num_pages - 1) * config.page_size
        self._seed = config.seed

    def checked_ids(self, token_ids: Any) -> Int32[np.ndarray, " T"]:
        """A prompt as int32 of its own; raises as `checked_ids`."""
        return checked_ids(token_ids, self._vocab_size, self._max_len)

    def make_requests(
        self,
        number: int,
        token_ids: Any,
        sampling: Any = None,
        *,
        finish_check: Any = None,
        namespace: Hashable = None,
        cache: str = "use",
        priority: int = 0,
        routing_key: Hashable = None,
    ) -> list[Request]:
        """The samples of the `number`-th request, checked as far as that needs no scheduler; labels are checked before.

        max_tokens is cut to what the prompt leaves of the context; None takes all that it leaves of context and pool.
        A request without a seed gets one from the engine's, for all its samples.

        Raises:
            TypeError, ValueError: as `checked_sampling`, `checked_ids` and `checked_mode`.
        """
        sampling = checked_sampling(sampling, finish_check, self._vocab_size)
        ids = self.checked_ids(token_ids)
        mode = checked_mode(cache)
        room = self._max_len - len(ids)
        pool_room = self._pool_len + 1 - len(ids)  # the last output token needs no KV
        max_tokens = max(1, min(room, pool_room)) if sampling.max_tokens is None else min(sampling.max_tokens, room)
        seed = sampling.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1, np.uint64)[0])
        stop_ids = frozenset(sampling.stop_token_ids or ())
        if not sampling.ignore_eos:
            stop_ids |= self.eos_token_ids
        return [
            Request(
                request_id=f"{number}.{index}" if index else str(number),
                token_ids=ids,
                sampling=sampling,
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                seed=seed,
                arrival=number,
                sample_index=index,
                finish_check=finish_check,
                namespace=namespace,
                cache=mode,
                priority=priority,
                routing_key=routing_key,
            )
            for index in range(sampling.n)
        ]
