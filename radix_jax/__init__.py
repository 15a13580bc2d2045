"""radix_jax: RadixAttention in JAX, an LLM inference engine in which KV belongs to prefixes instead of requests."""

import importlib
from typing import TYPE_CHECKING, Any

from radix_jax.jax_version import check_jax_version

if TYPE_CHECKING:
    from radix_jax.attention_backends import register_attention_backend
    from radix_jax.config import EngineConfig
    from radix_jax.engine import Engine
    from radix_jax.llm import LLM
    from radix_jax.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
    from radix_jax.rollouts import Rollouts

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "Rollouts",
    "SamplingParams",
    "register_attention_backend",
]

# Public name -> module, loaded on first use: the tree, the scheduler and the simulation must work without jax.
_HOMES = {
    "LLM": "radix_jax.llm",
    "CompletionOutput": "radix_jax.request",
    "Engine": "radix_jax.engine",
    "EngineConfig": "radix_jax.config",
    "Logprob": "radix_jax.request",
    "RequestOutput": "radix_jax.request",
    "Rollouts": "radix_jax.rollouts",
    "SamplingParams": "radix_jax.request",
    "register_attention_backend": "radix_jax.attention_backends",
}
_NEED_JAX = ("LLM", "Engine", "Rollouts")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'radix_jax' has no attribute {name!r}")
    if name in _NEED_JAX:
        check_jax_version()
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
