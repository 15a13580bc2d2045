"""From what a caller gives to a Request: checked ids, and every default resolved."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from radix_jax.request import Request, SamplingParams

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


def make_request(
    token_ids: Int32[np.ndarray, " T"],
    sampling: SamplingParams,
    *,
    number: int,
    room: int,
    pool_room: int,
    eos_token_ids: Collection[int],
    engine_seed: int,
    namespace: Hashable = None,
    priority: int = 0,
    routing_key: Hashable = None,
) -> Request:
    """The `number`-th request of an engine.

    room, pool_room: output tokens that context and pool leave. max_tokens is cut to the room of the context; None takes
    all that both leave. A request without a seed gets one from the engine's.
    """
    max_tokens = max(1, min(room, pool_room)) if sampling.max_tokens is None else min(sampling.max_tokens, room)
    seed = sampling.seed
    if seed is None:
        seed = int(np.random.SeedSequence([engine_seed, number]).generate_state(1, np.uint64)[0])
    stop_ids = frozenset(sampling.stop_token_ids or ())
    return Request(
        request_id=str(number),
        token_ids=token_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        stop_ids=stop_ids if sampling.ignore_eos else stop_ids | frozenset(eos_token_ids),
        seed=seed,
        arrival=number,
        namespace=namespace,
        priority=priority,
        routing_key=routing_key,
    )
