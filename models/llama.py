"""Llama (Touvron et al. 2023; Llama 3 ropes): config, NNX module, and the pure forward over its leaves."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import WeightSpec
from radix_jax.config import check_int
from radix_jax.models.base import Attend, ModelFamily, Weights
from radix_jax.models.layers import (
    RopeConfig,
    apply_rope,
    dense_causal_attention,
    linear,
    parse_rope,
    rms_norm,
    rope_tables,
    swiglu,
)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama model; head_dim is independent of hidden_size / num_heads.

    Raises:
        ValueError: sizes that can't be.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
            *("num_kv_heads", "head_dim", "max_position_embeddings"),
        ):
            check_int(name, getattr(self, name), at_least=1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rope rotates pairs")


class LlamaLayer(nnx.Module):
    """Leaves of one layer. Matrices are [in, out]."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.attn_norm = nnx.Param(jnp.ones(config.hidden_size))
        self.mlp_norm = nnx.Param(jnp.ones(config.hidden_size))
        init = nnx.initializers.lecun_normal()
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nnx.Param(init(rngs.params(), (config.hidden_size, q_width)))
        self.k_proj = nnx.Param(init(rngs.params(), (config.hidden_size, kv_width)))
        self.v_proj = nnx.Param(init(rngs.params(), (config.hidden_size, kv_width)))
        self.o_proj = nnx.Param(init(rngs.params(), (q_width, config.hidden_size)))
        self.gate_proj = nnx.Param(init(rngs.params(), (config.hidden_size, config.intermediate_size)))
        self.up_proj = nnx.Param(init(rngs.params(), (config.hidden_size, config.intermediate_size)))
        self.down_proj = nnx.Param(init(rngs.params(), (config.intermediate_size, config.hidden_size)))


class Llama(nnx.Module):
    """A Llama model. Called on one sequence it attends densely, without a cache: for training and as an oracle."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Param(
            nnx.initializers.normal(config.hidden_size**-0.5)(rngs.params(), (config.vocab_size, config.hidden_size))
        )
        self.layers = nnx.List([LlamaLayer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.Param(jnp.ones(config.hidden_size))
        if not config.tie_word_embeddings:
            self.head = nnx.Param(
                nnx.initializers.lecun_normal()(rngs.params(), (config.hidden_size, config.vocab_size))
            )

    def __call__(self, token_ids: Int32[jax.Array, " T"]) -> Float32[jax.Array, "T V"]:
        """Logits of every position."""
        weights = nnx.to_pure_dict(nnx.state(self))
        positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        _, hidden = forward(weights, self.config, token_ids, positions, None, _attend_densely)
        return linear(hidden, weights["head"] if "head" in weights else weights["embed"].T)


def _attend_densely(kv: None, _layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[None, jax.Array]:
    return kv, dense_causal_attention(q, k, v)


def forward(
    weights: Weights,
    config: LlamaConfig,
    token_ids: Int32[jax.Array, " T"],
    positions: Int32[jax.Array, " T"],
    kv: Any,
    attend: Attend,
) -> tuple[Any, Float32[jax.Array, "T D"]]:
    """(kv, hidden states after the last norm) of flat tokens; `attend` knows which tokens belong together."""
    x = weights["embed"][token_ids].astype(jnp.float32)
    tables = rope_tables(config.rope, config.head_dim, positions)
    for index in range(config.num_layers):
        with jax.named_scope(f"layer_{index}"):
            layer = weights["layers"][index]
            q, k, v = _project(layer, config, rms_norm(x, layer["attn_norm"], config.rms_norm_eps), tables)
            kv, attended = attend(kv, index, q, k, v)
            x = x + linear(attended.reshape(x.shape[0], -1), layer["o_proj"])
            normed = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
            x = x + swiglu(normed, layer["gate_proj"], layer["up_proj"], layer["down_proj"])
    return kv, rms_norm(x, weights["norm"], config.rms_norm_eps)


def _project(
    layer: Weights, config: LlamaConfig, x: Float[jax.Array, "T D"], tables: tuple[jax.Array, jax.Array]
) -> tuple[Float[jax.Array, "T N H"], Float[jax.Array, "T G H"], Float[jax.Array, "T G H"]]:
    q, k, v = (
        linear(x, layer[name]).reshape(x.shape[0], -1, config.head_dim) for name in ("q_proj", "k_proj", "v_proj")
    )
    return apply_rope(q, *tables), apply_rope(k, *tables), v


def parse_config(hf_config: dict[str, Any]) -> LlamaConfig:
    """LlamaConfig of a Hugging Face config.json.

    Raises:
        ValueError: a missing key, or a feature that Llama does not have, by name.
    """
    _refuse_foreign_features(hf_config)

    def need(name: str) -> Any:
        if hf_config.get(name) is None:
            raise ValueError(f"the model's config lacks {name!r}")
        return hf_config[name]

    num_heads = need("num_attention_heads")
    return LlamaConfig(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=hf_config.get("num_key_value_heads") or num_heads,
        head_dim=hf_config.get("head_dim") or need("hidden_size") // num_heads,
        rms_norm_eps=float(hf_config.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(hf_config),
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        max_position_embeddings=hf_config.get("max_position_embeddings") or 2048,
    )


def _refuse_foreign_features(hf_config: dict[str, Any]) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if hf_config.get(name):
            raise ValueError(f"config asks for {name}, which is not built for Llama")
    if hf_config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"config asks for hidden_act={hf_config['hidden_act']!r}; Llama has silu")
    # A window counts only where a layer uses it: some checkpoints carry the key with every layer at full attention.
    layer_types = set(hf_config.get("layer_types") or ())
    unused = hf_config.get("use_sliding_window") is False or layer_types == {"full_attention"}
    if layer_types - {"full_attention"} or (hf_config.get("sliding_window") and not unused):
        raise ValueError(
            f"config asks for sliding_window={hf_config.get('sliding_window')} in layer_types={sorted(layer_types)}; "
            "sliding windows are not built for Llama"
        )


def weight_specs(config: LlamaConfig) -> tuple[WeightSpec, ...]:
    """Where each leaf lies in a checkpoint. GGUF permutes q and k by heads, for a rope over neighbouring pairs."""
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = (
        ("q_proj", "self_attn.q_proj", "attn_q", (q, d), config.num_heads),
        ("k_proj", "self_attn.k_proj", "attn_k", (kv, d), config.num_kv_heads),
        ("v_proj", "self_attn.v_proj", "attn_v", (kv, d), 0),
        ("o_proj", "self_attn.o_proj", "attn_output", (d, q), 0),
        ("gate_proj", "mlp.gate_proj", "ffn_gate", (f, d), 0),
        ("up_proj", "mlp.up_proj", "ffn_up", (f, d), 0),
        ("down_proj", "mlp.down_proj", "ffn_down", (d, f), 0),
    )
    norms = (("attn_norm", "input_layernorm", "attn_norm"), ("mlp_norm", "post_attention_layernorm", "ffn_norm"))
    specs = [
        WeightSpec(("embed",), "model.embed_tokens.weight", "token_embd.weight", (config.vocab_size, d)),
        WeightSpec(("norm",), "model.norm.weight", "output_norm.weight", (d,)),
    ]
    for i in range(config.num_layers):
        for leaf, hf_name, gguf_name in norms:
            names = (f"model.layers.{i}.{hf_name}.weight", f"blk.{i}.{gguf_name}.weight")
            specs.append(WeightSpec(("layers", i, leaf), *names, (d,)))
        for leaf, hf_name, gguf_name, shape, rope_heads in matrices:
            names = (f"model.layers.{i}.{hf_name}.weight", f"blk.{i}.{gguf_name}.weight")
            path = ("layers", i, leaf)
            specs.append(WeightSpec(path, *names, shape, transpose=True, gguf_rope_heads=rope_heads))
    # A tied model's file may hold the head all the same: it is claimed, and not used.
    head = WeightSpec(
        ("head",),
        "lm_head.weight",
        "output.weight",
        (config.vocab_size, d),
        transpose=True,
        optional=config.tie_word_embeddings,
    )
    return (*specs, head)


LLAMA = ModelFamily(
    name="llama",
    architectures=("LlamaForCausalLM",),
    config_type=LlamaConfig,
    module_type=Llama,
    parse_config=parse_config,
    weight_specs=weight_specs,
    forward=forward,
)
