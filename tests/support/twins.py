"""The committed twins: tiny Llamas with the logits that transformers gives for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from radix_jax.checkpoints import load_weights, open_checkpoint
from radix_jax.functional import decode, prefill
from radix_jax.models.base import ModelParams
from radix_jax.models.registry import family_for_hf_config, make_params

TWINS = Path(__file__).parent.parent / "oracle" / "twins"
TWIN_NAMES = sorted(folder.name for folder in TWINS.iterdir() if folder.is_dir())


@dataclass(frozen=True)
class Twin:
    """token_ids: int32 [T]. logits: what transformers gives at every position, float32 [T, V]."""

    hf_config: dict[str, Any]
    params: ModelParams
    token_ids: np.ndarray
    logits: np.ndarray


@cache
def load_twin(name: str) -> Twin:
    """A twin by the name of its folder, in float32."""
    hf_config, params = load_params(TWINS / name)
    with np.load(TWINS / name / "expected.npz") as expected:
        return Twin(hf_config, params, expected["token_ids"], expected["logits"])


def load_params(folder: Path) -> tuple[dict[str, Any], ModelParams]:
    """(config.json, params) of a folder that `save_pretrained` wrote, through our own loader."""
    with open_checkpoint(folder) as checkpoint:
        family = family_for_hf_config(checkpoint.hf_config)
        config = family.parse_config(checkpoint.hf_config)
        specs = family.weight_specs(config)
        leaves = load_weights(checkpoint, specs, "float32", lambda spec, array: jnp.asarray(array), progress=False)
    weights: dict[Any, Any] = {}
    for spec, leaf in zip(specs, leaves, strict=True):
        if leaf is not None:
            *parents, last = spec.path
            inner = weights
            for part in parents:
                inner = inner.setdefault(part, {})
            inner[last] = leaf
    return checkpoint.hf_config, make_params(config, weights)


@cache
def _jitted(step: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(step)


def prefill_step(params: ModelParams) -> Callable[..., Any]:
    """(kv, inputs) -> (kv, logits), jitted, the pool not donated."""
    return partial(_jitted(prefill), params)


def decode_step(params: ModelParams) -> Callable[..., Any]:
    """(kv, inputs) -> (kv, logits), jitted, the pool not donated."""
    return partial(_jitted(decode), params)
