"""Names of the attention backends, and the functions registered under names of one's own.

Imports no jax, so that a setting is checked where it is given. What a backend computes is in
`radix_jax.pallas_kernels.paged_attention`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

AttentionFn = Callable[..., Any]
BUILT_IN_BACKENDS = ("auto", "xla", "pallas_gpu", "pallas_tpu", "pallas_interpret", "pallas_tpu_interpret")

# A registry, as of codecs: what a process has registered holds for all its engines.
_registered: dict[str, AttentionFn] = {}


def register_attention_backend(name: str, fn: AttentionFn) -> None:
    """Make `fn` the backend `name`, for `paged_attention(backend=name)` and EngineConfig(attention_backend=name).

    fn: takes what `paged_attention` takes, but for `backend`; keywords that it lacks are left out while they are at
    their defaults. A name registered before is given to the new function; engines made before keep the old one.

    Raises:
        ValueError: a name of a built-in backend, or an empty one.
        TypeError: a name that is no string, or something that can't be called.
    """
    if not isinstance(name, str):
        raise TypeError(f"name {name!r} is not a string")
    if not name or name in BUILT_IN_BACKENDS:
        raise ValueError(f"name {name!r} is taken: {', '.join(BUILT_IN_BACKENDS)} are built in; choose another")
    if not callable(fn):
        raise TypeError(f"backend {name!r} is a {type(fn).__name__}; give a function, as check-kernel takes it")
    _registered[name] = fn


def registered_backends() -> Mapping[str, AttentionFn]:
    """What was registered, by name; a view, not to be changed."""
    return MappingProxyType(_registered)


def backend_names() -> tuple[str, ...]:
    """Every name that EngineConfig.attention_backend takes now."""
    return (*BUILT_IN_BACKENDS, *_registered)
