"""Shapes of models that people run, by name: configs without weights."""

from radix_jax.models.layers import RopeConfig
from radix_jax.models.llama import LlamaConfig

_LLAMA3_ROPE = RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_len=8192)

MODEL_SHAPES: dict[str, LlamaConfig] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    "llama3-1b": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        rope=_LLAMA3_ROPE,
    ),
    "llama3-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope=_LLAMA3_ROPE,
    ),
    "qwen2.5-7b": LlamaConfig(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        max_position_embeddings=32768,
        rope=RopeConfig(theta=1000000.0),
    ),
    "qwen3-8b": LlamaConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope=RopeConfig(theta=1000000.0),
    ),
}
