"""Which family a checkpoint, a config or a module belongs to, and the params that the engine runs on."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from radix_jax.arrays import WeightSpec
from radix_jax.models.base import ModelFamily, ModelParams, Weights
from radix_jax.models.llama import LLAMA

_FAMILIES: list[ModelFamily] = [LLAMA]


def register_family(family: ModelFamily) -> None:
    """Make a family of one's own known to the engine.

    Raises:
        ValueError: a family with the same config type, or for the same architecture, is there already.
    """
    for known in _FAMILIES:
        if family.config_type is known.config_type or set(family.architectures) & set(known.architectures):
            raise ValueError(f"family {family.name!r} has the config type or an architecture of {known.name!r}")
    _FAMILIES.append(family)


def family_for_hf_config(hf_config: dict[str, Any]) -> ModelFamily:
    """The family that a config.json names.

    Raises:
        ValueError: no family of ours has this architecture.
    """
    named = tuple(hf_config.get("architectures") or ())
    for family in _FAMILIES:
        if set(named) & set(family.architectures):
            return family
    known = sorted(name for family in _FAMILIES for name in family.architectures)
    raise ValueError(f"architecture {', '.join(named) or '(none named)'} is not built; built are {', '.join(known)}")


def family_for_config(config: Any) -> ModelFamily:
    """The family of a config object.

    Raises:
        TypeError: not the config of a registered family.
    """
    for family in _FAMILIES:
        if type(config) is family.config_type:
            return family
    known = ", ".join(family.config_type.__name__ for family in _FAMILIES)
    raise TypeError(f"{type(config).__name__} is not the config of a registered family ({known}); register_family it")


def config_of(model: Any) -> Any:
    """The config of a module or of a config itself.

    Raises:
        TypeError: neither a registered config nor a module whose `config` is one.
    """
    config = getattr(model, "config", model) if isinstance(model, nnx.Module) else model
    return family_for_config(config) and config


def params_of(model: Any, params: Any = None) -> ModelParams:
    """The engine's params of a user's module or config. The leaves are the caller's own, not copies.

    params: an `nnx.State`, the nested dict of it, or ModelParams; None takes the module's own.

    Raises:
        TypeError: a config without params.
        ValueError: a missing, an extra or a wrongly shaped leaf.
    """
    config = config_of(model)
    if isinstance(params, ModelParams):
        if params.config != config:
            raise ValueError("params were made for another config than the model's")
        return params
    if params is None:
        if not isinstance(model, nnx.Module):
            raise TypeError(f"a {type(model).__name__} holds no weights; give params=")
        params = nnx.state(model, nnx.Param)
    weights = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return make_params(config, weights)


def make_params(config: Any, weights: Weights) -> ModelParams:
    """ModelParams over the given leaves, the head derived where the config ties it to the embedding.

    Raises:
        ValueError: a missing, an extra or a wrongly shaped leaf.
    """
    family = family_for_config(config)
    if family.architectures:
        _check_leaves(family.weight_specs(config), weights)
    needed = "embed" if config.tie_word_embeddings else "head"
    if not hasattr(weights.get(needed), "shape"):
        raise ValueError(f"params hold no array {needed!r} at their top: the engine takes logits from it; name it so")
    if not config.tie_word_embeddings:
        head = weights["head"]
    else:
        # A matmul with a transposed matrix is slow on CPUs; accelerators read it as it lies.
        head = _untied_head(weights["embed"]) if jax.default_backend() == "cpu" else None
        weights = {name: leaf for name, leaf in weights.items() if name != "head"}
    return ModelParams(weights=weights, head=head, config=config)


@jax.jit
def _untied_head(embed: jax.Array) -> jax.Array:
    return embed.T


def _check_leaves(specs: tuple[WeightSpec, ...], weights: Weights) -> None:
    leaves = {
        tuple(getattr(part, "key", getattr(part, "idx", None)) for part in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(weights)[0]
    }
    for spec in specs:
        leaf = leaves.pop(spec.path, None)
        shape = spec.shape[::-1] if spec.transpose else spec.shape
        if leaf is None:
            if spec.optional:
                continue
            raise ValueError(f"params lack the leaf {_dotted(spec.path)} of shape {shape}")
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"leaf {_dotted(spec.path)} is a {type(leaf).__name__} of dtype {dtype}, not an array of floats"
            )
        if tuple(leaf.shape) != shape:
            raise ValueError(f"leaf {_dotted(spec.path)} has shape {tuple(leaf.shape)}, the model needs {shape}")
    if leaves:
        raise ValueError(f"params hold leaves that the model has not: {', '.join(map(_dotted, leaves))}")


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
