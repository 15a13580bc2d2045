"""Checkpoints in one GGUF file: configuration from its metadata, tensors dequantised by the `gguf` library."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape

from radix_jax.checkpoints.checkpoint import Checkpoint, TensorInfo
from radix_jax.checkpoints.errors import CheckpointError
from radix_jax.gguf_file import GGUFHeader, GGUFTensor, read_gguf_header

_PIECE_VALUES = 1 << 20
_PLAIN_TYPES = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.F64: np.dtype(np.float64),
}
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def open_gguf(path: Path) -> Checkpoint:
    """Open the GGUF file at `path`.

    Raises:
        GGUFError: the file is damaged or cut off.
        CheckpointError: it lacks metadata that a model needs, or is one part of several.
    """
    header = read_gguf_header(path)
    num_parts = header.metadata.get("split.count", 1)
    if num_parts > 1:
        raise CheckpointError(f"{path} is one of {num_parts} parts; join them first with `llama-gguf-split --merge`")
    eos_keys = [key for key in _EOS_KEYS if key in header.metadata]
    return Checkpoint(
        path=path,
        format="gguf",
        hf_config=hf_config_of(header),
        eos_token_ids=frozenset(header.metadata[key] for key in eos_keys),
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        reader=GGUFTensors(header),
    )


class GGUFTensors:
    """Tensors of one GGUF file, read from a memory map."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        with header.path.open("rb") as file:
            self._data: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.tensors = {
            name: TensorInfo(shape=tensor.shape, dtype=tensor.type.name, file=header.path)
            for name, tensor in header.tensors.items()
        }

    def read_pieces(self, name: str) -> Iterator[np.ndarray]:
        """Values of tensor `name` in slices of about a million, float32 (or the stored float type).

        Raises:
            CheckpointError: the gguf library cannot dequantise its type.
        """
        if self._data is None:
            raise CheckpointError(f"{self._header.path} is closed; open the checkpoint again to read tensor {name}")
        tensor = self._header.tensors[name]
        stored = _stored_rows(tensor, self._data)
        piece_len = max(1, _PIECE_VALUES // max(1, int(np.prod(tensor.shape[1:])))) if len(tensor.shape) > 1 else None
        for start in range(0, len(stored), piece_len or max(1, len(stored))):
            piece = stored[start : start + piece_len] if piece_len else stored
            yield piece if tensor.type in _PLAIN_TYPES else self._dequantize(piece, tensor)

    def _dequantize(self, stored: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
        try:
            return dequantize(stored, tensor.type)
        except NotImplementedError:
            raise CheckpointError(
                f"{self._header.path}: tensor {tensor.name} has type {tensor.type.name}, which the gguf library cannot "
                "dequantise; update gguf, or use a file of another quantisation"
            ) from None

    def close(self) -> None:
        """Let go of the memory map; it goes when the last array that looks into it does."""
        self._data = None


def _stored_rows(tensor: GGUFTensor, data: mmap.mmap) -> np.ndarray:
    """The tensor as it lies in the file: plain floats [shape], or bytes [.., bytes a row]."""
    plain = _PLAIN_TYPES.get(tensor.type)
    flat = np.frombuffer(data, np.uint8, count=tensor.num_bytes, offset=tensor.offset)
    if plain is not None:
        return flat.view(plain).reshape(tensor.shape)
    return flat.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.type))


def hf_config_of(header: GGUFHeader) -> dict[str, Any]:
    """A config.json as Hugging Face would have it, made from GGUF metadata and tensor shapes.

    Raises:
        CheckpointError: a key without which no model can be built is missing; names it.
    """
    metadata, tensors = header.metadata, header.tensors
    arch = _required(header, "general.architecture")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    hidden_size = _required(header, f"{arch}.embedding_length")
    num_heads = _required(header, f"{arch}.attention.head_count")
    query = tensors.get("blk.0.attn_q.weight")
    head_dim = get("attention.key_length") or (query.shape[0] if query else hidden_size) // num_heads
    embedding = tensors.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding else _required(header, f"{arch}.vocab_size")
    config = {
        "architectures": [_architecture(arch, get("expert_count", 0))],
        "model_type": arch,
        "hidden_size": hidden_size,
        "intermediate_size": _required(header, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _required(header, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _required(header, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, get),
        "max_position_embeddings": _required(header, f"{arch}.context_length"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    rotary_dim = get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if get("attention.sliding_window"):
        config["sliding_window"] = get("attention.sliding_window")
    return config


def _architecture(arch: str, num_experts: int) -> str:
    """Hugging Face's class name; one that is not known here goes on under GGUF's own name, for models to refuse."""
    if num_experts:
        return f"{arch} with {num_experts} experts"
    return {"llama": "LlamaForCausalLM"}.get(arch, arch)


def _rope_scaling(header: GGUFHeader, get: Any) -> dict[str, Any] | None:
    """Rope scaling by metadata, or by the factors that converters write for Llama 3 (rope_freqs.weight).

    {"rope_type": "factors", "factors": [head_dim / 2 floats]} divides the inverse frequency of each pair; it is what
    a llama3 scaling comes to, whose own parameters GGUF does not keep.
    """
    factors = header.tensors.get("rope_freqs.weight")
    if factors is not None:
        reader = GGUFTensors(header)
        values = np.concatenate([np.array(piece, np.float32) for piece in reader.read_pieces(factors.name)])
        reader.close()
        return {"rope_type": "factors", "factors": values.tolist()}
    kind = get("rope.scaling.type", "none")
    factor = get("rope.scaling.factor", get("rope.scale_linear", 1.0))
    if kind == "none" and factor == 1.0:
        return None
    scaling: dict[str, Any] = {"rope_type": "linear" if kind == "none" else kind, "factor": factor}
    original_len = get("rope.scaling.original_context_length")
    if original_len:
        scaling["original_max_position_embeddings"] = original_len
    return scaling


def _required(header: GGUFHeader, key: str) -> Any:
    if key not in header.metadata:
        raise CheckpointError(f"{header.path} has no metadata {key}: not a language model that can be run from GGUF")
    return header.metadata[key]
