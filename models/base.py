"""What every model family gives the engine, and the params that the functional core takes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jaxtyping import Float, Int32

from radix_jax.arrays import WeightSpec, register_pytree

# attend(kv, layer, q[T, N, H], k[T, G, H], v[T, G, H]) -> (kv, out[T, N, H]); kv is whatever the attention keeps.
Attend = Callable[[Any, int, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]
# A nested dict of leaves, as `nnx.to_pure_dict(nnx.state(module))` gives it.
Weights = dict[Any, Any]


@runtime_checkable
class ModelConfig(Protocol):
    """What the engine and the pool need to know of any model."""

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def num_layers(self) -> int:
        """L."""
        ...

    @property
    def num_heads(self) -> int:
        """N."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """G."""
        ...

    @property
    def head_dim(self) -> int:
        """H."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Longest context that the model was made for, in tokens."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """The head is the embedding, transposed."""
        ...


@register_pytree
@dataclass(frozen=True)
class ModelParams:
    """The first argument of `prefill` and `decode`: the leaves of a model, and its config as static data.

    weights: nested dict of leaves. head: [D, V]; None stands for the tied embedding read transposed.
    """

    weights: Weights
    head: Float[jax.Array, "D V"] | None
    config: Any = field(metadata={"static": True})


def _reads_no_checkpoints(_: Any) -> Any:
    raise ValueError(
        "this family has no parse_config and weight_specs, so it reads no checkpoints; give a config and params"
    )


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A model family, as the registry holds it.

    name: short name, and the `general.architecture` of GGUF files.
    config_type: the frozen config dataclass, a ModelConfig.
    forward: (weights, config, token_ids[T], positions[T], kv, attend) -> (kv, hidden[T, D]). The tokens of several
        requests lie side by side; what a token sees of others it sees through `attend`, and its place is its position.
        `weights["embed"]` is [V, D] and, unless the config ties them, `weights["head"]` [D, V]: logits are
        hidden @ head.

    What only checkpoints need; a family of one's own may leave it out, and its leaves are then not checked:

    architectures: values of `architectures` in a Hugging Face config.json.
    module_type: the NNX module, made as `module_type(config, rngs=rngs)`.
    parse_config: config.json as a dict -> config; raises ValueError on a feature that the family doesn't have.
    weight_specs: config -> where each leaf of the module lies in a checkpoint.
    """

    name: str
    config_type: type
    forward: Callable[
        [Weights, Any, Int32[jax.Array, " T"], Int32[jax.Array, " T"], Any, Attend], tuple[Any, Float[jax.Array, "T D"]]
    ]
    architectures: tuple[str, ...] = ()
    module_type: type[nnx.Module] | None = None
    parse_config: Callable[[dict[str, Any]], Any] = _reads_no_checkpoints
    weight_specs: Callable[[Any], tuple[WeightSpec, ...]] = _reads_no_checkpoints
