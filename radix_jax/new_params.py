"""New params for a running engine: only such as take the place of the old ones leaf by leaf, and on the device."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from radix_jax.models.base import ModelParams
from radix_jax.models.registry import make_params

_Path = tuple[Any, ...]


def fitting_params(old: ModelParams, new: Any, place: Callable[[Any], Any]) -> ModelParams:
    """`new` as params of the model that `old` are of, on the device.

    new: a module, an `nnx.State`, the nested dict of it, or ModelParams. place: puts a tree of leaves on the device.

    Raises:
        TypeError: none of these, or a leaf is no array. ValueError: another model, a missing or an extra leaf, one of
            another shape or dtype, or one that was deleted or donated.
    """
    config = old.config
    if isinstance(new, nnx.Module | ModelParams) and getattr(new, "config", None) != config:
        raise ValueError("params are of another config than the engine's; make a new Engine for another model")
    if isinstance(new, ModelParams):
        _check_leaves({"weights": old.weights, "head": old.head}, {"weights": new.weights, "head": new.head})
        return place(new)
    weights: Any = nnx.state(new, nnx.Param) if isinstance(new, nnx.Module) else new
    weights = nnx.to_pure_dict(weights) if isinstance(weights, nnx.State) else weights
    if not isinstance(weights, dict):
        raise TypeError(
            f"params are a {type(new).__name__}; give a module, its nnx.State or nested dict, or ModelParams"
        )
    if config.tie_word_embeddings:
        weights = {name: leaf for name, leaf in weights.items() if name != "head"}
    _check_leaves(old.weights, weights)
    return place(make_params(config, place(weights)))


def _check_leaves(old: Any, new: Any) -> None:
    """Raise unless both have the same leaves, and the new ones are alive."""
    leaves, new_leaves = _leaves(old), _leaves(new)
    for path, leaf in new_leaves.items():
        if not isinstance(leaf, np.ndarray | jax.Array) or isinstance(leaf, Tracer):
            raise TypeError(f"leaf {_dotted(path)} is a {type(leaf).__name__}; give arrays that hold values")
        if path not in leaves:
            raise ValueError(f"params hold the leaf {_dotted(path)}, {_form(leaf)}, which the engine's have not")
        if (leaf.shape, leaf.dtype) != (leaves[path].shape, leaves[path].dtype):
            raise ValueError(
                f"leaf {_dotted(path)} is {_form(leaf)}, the engine's is {_form(leaves[path])}; an update keeps shapes "
                "and dtypes, so convert it, or make a new Engine"
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(f"leaf {_dotted(path)}, {_form(leaf)}, was deleted, or donated to a jitted function")
    for path in leaves.keys() - new_leaves.keys():
        raise ValueError(f"params lack the leaf {_dotted(path)}, in the engine {_form(leaves[path])}")


def _leaves(tree: Any) -> dict[_Path, Any]:
    return {
        tuple(getattr(part, "key", getattr(part, "idx", part)) for part in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _form(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _dotted(path: _Path) -> str:
    return ".".join(map(str, path))
