"""The pytrees that cross to the device, and the letters of their shapes.

B row (a request's share of a step) · T query token, all rows flat · S kv token · P page (of a row, or of the pool)
C page copy · K page_size · L layer · N q head · G kv head · H head_dim · D model · F ffn · V vocabulary · W = 2 * G * H
U seat (what a running request keeps)

The pool is one flat array `kv[L * P, K, W]`: page p of layer l is row `l * num_pages + p`. Lanes of one token:

    [0, H) K of head 0   [H, 2H) V of head 0   [2H, 3H) K of head 1   ...   [(2G-1)H, 2GH) V of head G-1
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float, Float32, Int32, UInt32

Array = jax.Array | np.ndarray
KVPool = Float[jax.Array, "LP K W"]
T = TypeVar("T")


def register_pytree(node_type: type[T]) -> type[T]:
    """Make a frozen dataclass a pytree whose `static` fields are structure, as `jax.tree_util.register_dataclass` does.

    JAX rebuilds pytrees with shapes, shardings or None where arrays were. Here that does not run the constructor, which
    takes arrays alone.
    """
    fields = dataclasses.fields(node_type)  # pyright: ignore[reportArgumentType]
    data = [field.name for field in fields if not field.metadata.get("static")]
    static = [field.name for field in fields if field.metadata.get("static")]

    def flatten(node: T) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(node, name) for name in data], tuple(getattr(node, name) for name in static)

    def flatten_with_keys(node: T) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, structure = flatten(node)
        return list(zip(map(jax.tree_util.GetAttrKey, data), children, strict=True)), structure

    def unflatten(structure: tuple[Any, ...], children: Iterable[Any]) -> T:
        node = object.__new__(node_type)
        for name, value in zip([*data, *static], [*children, *structure], strict=True):
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(node_type, flatten_with_keys, unflatten, flatten)
    return node_type


@register_pytree
@dataclass(frozen=True)
class StepInputs:
    """What a prefill or decode step reads besides params and pool. Rows are contiguous in the flat token axis.

    token_ids: ids to compute, row after row; padding 0.
    positions: place of each token in its request; padding 0.
    page_table: page ids of each row; unused entries 0, the null page.
    kv_lens: tokens of each row whose KV is in the pool once this step has written its own; 0 for a padding row.
    cu_q_lens: row b computes tokens [cu_q_lens[b], cu_q_lens[b + 1]); flat from the last real row on.
    write_slots: page * page_size + offset for each token; padding: distinct ids from L * P * page_size up, past the
        last layer's pages. Never negative: a negative index wraps around.
    token_src: for each token the row of the step before that samples it, or -1 where token_ids counts; the engine's
        steps put those tokens in. None in what `prefill` and `decode` get.
    next_ids, num_prompt_logprobs: of each row the token of its prompt behind its last one here, and how many most
        likely ones are asked for besides it and the others of the row; -1: none is asked for. None as token_src.
    """

    token_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    page_table: Int32[Array, "B P"]
    kv_lens: Int32[Array, " B"]
    cu_q_lens: Int32[Array, " B_plus_1"]
    write_slots: Int32[Array, " T"]
    token_src: Int32[Array, " T"] | None = None
    next_ids: Int32[Array, " B"] | None = None
    num_prompt_logprobs: Int32[Array, " B"] | None = None


@register_pytree
@dataclass(frozen=True)
class SamplingInputs:
    """How the next token of each row is chosen; padding rows are greedy.

    temperature: 0 is greedy. top_k: 0 keeps all. top_p: 1 keeps all. min_p: 0 keeps all.
    seed: low and high 32 bits of the request's seed. sample_index: which sample of the request.
    position: place of the token being chosen in its request.
    seat: the row of SamplerState that belongs to the request.
    repetition_penalty: 1 is none. presence_penalty, frequency_penalty: 0 is none.
    min_len: before this place no stop id may be chosen; 0: any may.
    adjusts: 1 where penalties or bias change the logits, so that the seat's counts are read and kept.
    num_logprobs: -1: none. 0: that of the chosen token. Above: those of so many most likely ones besides.
    """

    temperature: Float32[Array, " B"]
    top_k: Int32[Array, " B"]
    top_p: Float32[Array, " B"]
    min_p: Float32[Array, " B"]
    seed: UInt32[Array, "B 2"]
    sample_index: Int32[Array, " B"]
    position: Int32[Array, " B"]
    seat: Int32[Array, " B"]
    repetition_penalty: Float32[Array, " B"]
    presence_penalty: Float32[Array, " B"]
    frequency_penalty: Float32[Array, " B"]
    min_len: Int32[Array, " B"]
    adjusts: Int32[Array, " B"]
    num_logprobs: Int32[Array, " B"]


@register_pytree
@dataclass(frozen=True)
class SamplerState:
    """What the sampler knows of the running requests, a row each; steps update it in place. A row of zeros changes
    nothing.

    tokens: of each token how often it is in the output, in bits [0, 29); bit 29: it ends the request (a stop id); bit
        30: it is in the prompt.
    bias: what is added to each logit.
    """

    tokens: Int32[jax.Array, "U V"]
    bias: Float32[jax.Array, "U V"]


@register_pytree
@dataclass(frozen=True)
class PageCopies:
    """Pages to copy before a step, within each layer.

    sources, targets: page ids of one layer. Padding copies page 0 to `num_pages`, which is no page, and is dropped.
    """

    sources: Int32[Array, " C"]
    targets: Int32[Array, " C"]


@dataclass(frozen=True)
class WeightSpec:
    """Where one leaf of a model's params comes from in a checkpoint.

    path: the leaf's place in the params, e.g. ("layers", 3, "q_proj").
    hf_name, gguf_name: tensor names in safetensors and GGUF files.
    shape: as stored in the file, [out, in] for a matrix.
    transpose: the leaf is the stored matrix transposed, [in, out].
    gguf_rope_heads: GGUF stores the rows of this matrix permuted for its own rope, by this many heads; 0: it doesn't.
    optional: may be missing (the head of a model that ties it to the embedding).
    """

    path: tuple[str | int, ...]
    hf_name: str
    gguf_name: str
    shape: tuple[int, ...]
    transpose: bool = False
    gguf_rope_heads: int = 0
    optional: bool = False
