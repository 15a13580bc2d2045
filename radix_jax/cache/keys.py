"""Token ids as bytes: the form in which the tree compares keys, and typed namespaces."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

TOKEN_BYTES = 4  # of an int32 token id
TokenIds = Sequence[int | np.integer] | np.ndarray
KeyBytes = bytes | memoryview

INT32 = np.dtype(np.int32)  # numpy is quicker with a dtype than with a scalar type
_LONGEST_COPY = 8192  # tokens up to which copying a key costs less than slicing views of it

_INT32_RANGE = np.iinfo(np.int32)
_FIRST_CHUNK = 4096  # tokens that one numpy comparison costs about as much as its overhead
_CHUNK_GROWTH = 4


def to_int32(values: TokenIds, what: str) -> Int32[np.ndarray, " N"]:
    """`values` as a flat int32 array; an int32 array comes back as it is, without a copy.

    Raises:
        ValueError: not flat, not integers, or a value outside int32 (which would wrap onto another id).
    """
    if isinstance(values, np.ndarray) and values.dtype is INT32 and values.ndim == 1:
        return values
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(
            f"{what} must be one flat sequence of integers, got shape {array.shape}; pass one row at a time"
        )
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{what} must be integers that fit int32, got values of type {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < _INT32_RANGE.min or high > _INT32_RANGE.max:
        raise ValueError(
            f"{what} must fit int32 [{_INT32_RANGE.min}, {_INT32_RANGE.max}], got values in [{low}, {high}]"
        )
    return array.astype(np.int32, copy=False)


def token_bytes(ids: TokenIds) -> bytes:
    """Bytes of the ids as native int32, 4 a token: two keys are equal exactly if their bytes are.

    Raises:
        ValueError: as `to_int32`.
    """
    return to_int32(ids, "token ids").tobytes()


def key_bytes(ids: TokenIds) -> KeyBytes:
    """As `token_bytes`, but of a long array a view, since the copy would take longer than all comparisons.

    Raises:
        ValueError: as `to_int32`.
    """
    if type(ids) is np.ndarray and ids.dtype is INT32 and ids.ndim == 1 and ids.size <= _LONGEST_COPY:
        return ids.tobytes()  # the usual case, without a second call
    array = to_int32(ids, "token ids")
    return array.tobytes() if array.size <= _LONGEST_COPY else np.ascontiguousarray(array).data.cast("B")


def check_num_pages(num_given: int, num_tokens: int, page_size: int) -> None:
    """Raise ValueError unless the page ids are one a full page of the tokens, or one more where a tail is left."""
    num_pages = num_tokens // page_size
    if num_given != num_pages and num_given != -(-num_tokens // page_size):
        raise ValueError(
            f"{num_given} pages for {num_tokens} tokens at page_size={page_size}; pass {num_pages} page ids, one a "
            "full page, or one more if a tail is left"
        )


def common_len(edge: bytes, key: KeyBytes, start: int) -> int:
    """Tokens of `edge` that `key` repeats from byte `start` on.

    Looks through chunks that grow, so that an early difference in a long edge costs little.
    """
    limit = min(len(edge), len(key) - start) // TOKEN_BYTES
    ours = np.frombuffer(edge, INT32, limit)
    theirs = np.frombuffer(key, INT32, limit, start)
    done = 0
    chunk = _FIRST_CHUNK
    while done < limit:
        differs = ours[done : done + chunk] != theirs[done : done + chunk]
        place = int(differs.argmax())
        if differs[place]:
            return done + place
        done += chunk
        chunk *= _CHUNK_GROWTH
    return limit


class OfWeights(NamedTuple):
    """A caller's namespace under one version of the weights, the first one excepted."""

    namespace: Hashable
    weight_version: int

    def __repr__(self) -> str:
        return f"{self.namespace!r} of weights {self.weight_version}"


def of_weights(namespace: Hashable, weight_version: int) -> Hashable:
    """The namespace in the cache of KV that weights of this version computed for the caller's `namespace`: no two
    versions share one, so that KV of old weights matches nothing. The first version, 0, has the caller's own."""
    return OfWeights(namespace, weight_version) if weight_version else namespace


def weights_of(namespace: Hashable) -> tuple[Hashable, int]:
    """What `of_weights` was given: the caller's namespace, and the version."""
    return (namespace.namespace, namespace.weight_version) if type(namespace) is OfWeights else (namespace, 0)


def namespace_key(namespace: Hashable) -> Hashable:
    """A key that two namespaces share only if they are equal in value and in type, part by part.

    Python holds 1, True and 1.0 for equal; here they are three namespaces, inside tuples and frozensets too.

    Raises:
        TypeError: `namespace` is not hashable.
    """
    if namespace is None or type(namespace) is str:
        return namespace  # equal to nothing of another type, nor to the tuples below
    try:
        hash(namespace)
    except TypeError as error:
        raise TypeError(f"namespace {namespace!r} is not hashable; use a str, a number or a tuple of them") from error
    if isinstance(namespace, tuple):
        return type(namespace), tuple(namespace_key(part) for part in namespace)
    if isinstance(namespace, frozenset):
        return type(namespace), frozenset(namespace_key(part) for part in namespace)
    return type(namespace), namespace
