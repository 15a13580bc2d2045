"""A model of one's own in Flax NNX, for the engine and its cache: a small GPT, with nothing of the Llama family."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from radix_jax.models.base import ModelFamily
from radix_jax.models.registry import register_family


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 96
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    max_position_embeddings: int = 128
    tie_word_embeddings: bool = False


class Layer(nnx.Module):
    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        width, self.heads = config.width, (config.num_heads, config.head_dim)
        self.attn_norm, self.mlp_norm = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.qkv, self.out = nnx.Linear(width, 3 * width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, index, kv, attend):
        q, k, v = (part.reshape(-1, *self.heads) for part in jnp.split(self.qkv(self.attn_norm(x)), 3, axis=-1))
        kv, attended = attend(kv, index, q, k, v)  # the one place where tokens see each other
        x = x + self.out(attended.reshape(x.shape))
        return kv, x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config, init = config, nnx.initializers.normal(0.2)
        self.embed = nnx.Param(init(rngs.params(), (config.vocab_size, config.width)))
        self.places = nnx.Param(init(rngs.params(), (config.max_position_embeddings, config.width)))
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Param(init(rngs.params(), (config.width, config.vocab_size)))

    def hidden(self, token_ids, positions, kv, attend):
        x = self.embed[token_ids] + self.places[positions]
        for index, layer in enumerate(self.layers):
            kv, x = layer(x, index, kv, attend)
        return kv, self.norm(x)

    def __call__(self, token_ids):  # dense: logits of every position of one sequence
        return self.hidden(token_ids, jnp.arange(len(token_ids)), None, attend_densely)[1] @ self.head[...]


def attend_densely(kv, index, q, k, v):
    return kv, jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def forward(weights, config, token_ids, positions, kv, attend):
    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, weights)
    return nnx.merge(graph, state).hidden(token_ids, positions, kv, attend)


register_family(ModelFamily(name="my-gpt", config_type=GPTConfig, forward=forward))


def tiny():  # radix-jax check-model examples.own_model_nnx:tiny
    return GPT(GPTConfig(), rngs=nnx.Rngs(0)), None
