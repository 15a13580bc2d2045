"""A model of one's own in Flax linen, for the engine and its cache: a small GPT with grouped heads and a tied head."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from radix_jax.models.base import ModelFamily
from radix_jax.models.registry import register_family


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 96
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 128
    tie_word_embeddings: bool = True


class Layer(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, x, index, kv, attend):
        config, normed = self.config, nn.LayerNorm()(x)
        q = nn.DenseGeneral((config.num_heads, config.head_dim))(normed)
        k, v = (nn.DenseGeneral((config.num_kv_heads, config.head_dim))(normed) for _ in "kv")
        kv, attended = attend(kv, index, q, k, v)  # the one place where tokens see each other
        x = x + nn.DenseGeneral(config.width, axis=(-2, -1))(attended)
        return kv, x + nn.Dense(config.width)(nn.gelu(nn.Dense(4 * config.width)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, token_ids, positions, kv, attend):
        config, init = self.config, nn.initializers.normal(0.2)
        embed = self.param("embed", init, (config.vocab_size, config.width))
        places = self.param("places", init, (config.max_position_embeddings, config.width))
        x = embed[token_ids] + places[positions]
        for index in range(config.num_layers):
            kv, x = Layer(config)(x, index, kv, attend)
        return kv, nn.LayerNorm()(x)


def attend_densely(kv, index, q, k, v):
    return kv, jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def forward(weights, config, token_ids, positions, kv, attend):
    return GPT(config).apply({"params": weights}, token_ids, positions, kv, attend)


def dense(weights, config, token_ids):  # logits of every position of one sequence
    return forward(weights, config, token_ids, jnp.arange(len(token_ids)), None, attend_densely)[1] @ weights["embed"].T


register_family(ModelFamily(name="my-linen-gpt", config_type=GPTConfig, forward=forward))


def tiny():  # radix-jax check-model examples.own_model_linen:tiny
    config, no_token = GPTConfig(), jnp.zeros(1, jnp.int32)
    return config, GPT(config).init(jax.random.key(0), no_token, no_token, None, attend_densely)["params"]
