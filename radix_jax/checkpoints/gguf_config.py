"""The configuration of a model in Hugging Face's words, from the metadata of a GGUF file."""

from typing import Any

import numpy as np

from radix_jax.checkpoints.errors import CheckpointError
from radix_jax.gguf_file import GGUFHeader


def hf_config_of(header: GGUFHeader, rope_factors: np.ndarray | None) -> dict[str, Any]:
    """A config.json as Hugging Face would have it, made from GGUF metadata and tensor shapes.

    rope_factors: the tensor rope_freqs.weight, if the file has it.

    Raises:
        CheckpointError: a key without which no model can be built is missing or no number; names it.
    """
    metadata, tensors = header.metadata, header.tensors
    arch = _required(header, "general.architecture")

    def number(key: str, default: float | None = None) -> Any:
        return _number(header, f"{arch}.{key}", default)

    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    query = tensors.get("blk.0.attn_q.weight")
    head_dim = number("attention.key_length", (query.shape[0] if query else hidden_size) // num_heads)
    embedding = tensors.get("token_embd.weight")
    config = {
        "architectures": [_architecture(arch, metadata.get(f"{arch}.expert_count", 0))],
        "model_type": arch,
        "hidden_size": hidden_size,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "max_position_embeddings": number("context_length"),
        "vocab_size": embedding.shape[0] if embedding else number("vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    config["rope_scaling"] = _rope_scaling(header, config, rope_factors)
    rotary_dim = number("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    window = metadata.get(f"{arch}.attention.sliding_window")
    if window:
        config["sliding_window"] = window
    return config


def _architecture(arch: str, num_experts: int) -> str:
    """Hugging Face's class name; one that is not known here goes on under GGUF's own name, for models to refuse."""
    if num_experts:
        return f"{arch} with {num_experts} experts"
    return {"llama": "LlamaForCausalLM"}.get(arch, arch)


def _rope_scaling(header: GGUFHeader, config: dict[str, Any], factors: np.ndarray | None) -> dict[str, Any] | None:
    """Rope scaling as config.json has it; None where there is none."""
    if factors is not None and (factors != 1.0).any():
        return _llama3_scaling(header, config, factors)
    rope = f"{config['model_type']}.rope"
    kind = header.metadata.get(f"{rope}.scaling.type", "none")
    factor = header.metadata.get(f"{rope}.scaling.factor", header.metadata.get(f"{rope}.scale_linear", 1.0))
    if kind == "none" and factor == 1.0:
        return None
    scaling: dict[str, Any] = {"rope_type": "linear" if kind == "none" else kind, "factor": factor}
    original_len = header.metadata.get(f"{rope}.scaling.original_context_length")
    if original_len:
        scaling["original_max_position_embeddings"] = original_len
    return scaling


def _llama3_scaling(header: GGUFHeader, config: dict[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """The llama3 scaling that gives these factors; GGUF keeps them and not its parameters.

    Between the ends, 1 / factor is linear in the frequency: 1 / factor = kept + (1 - kept) / largest, where
    kept = (original_len / wavelength - low) / (high - low). Only the ratios of original_len, low and high matter, so
    low is 1 (Llama 3.1 model card).

    Raises:
        CheckpointError: no llama3 scaling gives these factors.
    """
    pairs = np.arange(len(factors)) / len(factors)
    per_turn = config["rope_theta"] ** -pairs / (2 * np.pi)
    largest = float(factors.max())
    kept = (1 / factors.astype(np.float64) - 1 / largest) / (1 - 1 / largest)
    between = (kept > 0) & (kept < 1)
    if between.sum() >= 2:
        slope, offset = np.polyfit(per_turn[between], kept[between], 1)
        high, original_len = 1 - 1 / offset, round(-slope / offset)
        fitted = np.clip((original_len * per_turn - 1) / (high - 1), 0, 1)
        if np.allclose(fitted + (1 - fitted) / largest, 1 / factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": 1.0,
                "high_freq_factor": float(high),
                "original_max_position_embeddings": original_len,
            }
    raise CheckpointError(f"{header.path}: rope_freqs.weight is not a llama3 rope scaling, the one that is built")


def _required(header: GGUFHeader, key: str) -> Any:
    if key not in header.metadata:
        raise CheckpointError(f"{header.path} has no metadata {key}: not a language model that can be run from GGUF")
    return header.metadata[key]


def _number(header: GGUFHeader, key: str, default: float | None = None) -> Any:
    """A positive number of the metadata; without `default` it must be there."""
    value = header.metadata.get(key, default) if default is not None else _required(header, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"{header.path}: metadata {key} is {value!r}, not one number above 0")
    return value
