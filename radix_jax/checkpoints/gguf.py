"""Checkpoints in one GGUF file: tensors dequantised by the `gguf` library, piece by piece."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape

from radix_jax.checkpoints.checkpoint import Checkpoint, TensorInfo
from radix_jax.checkpoints.errors import CheckpointError
from radix_jax.checkpoints.gguf_config import hf_config_of
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
    reader = GGUFTensors(header)
    eos_keys = [key for key in _EOS_KEYS if key in header.metadata]
    return Checkpoint(
        path=path,
        format="gguf",
        hf_config=hf_config_of(header, _rope_factors(reader)),
        eos_token_ids=frozenset(header.metadata[key] for key in eos_keys),
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        reader=reader,
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


def _rope_factors(reader: GGUFTensors) -> np.ndarray | None:
    """What converters write of a Llama 3 rope scaling: by what each pair's frequency is divided, float32 [H / 2]."""
    if "rope_freqs.weight" not in reader.tensors:
        return None
    return np.concatenate([np.asarray(piece, np.float32) for piece in reader.read_pieces("rope_freqs.weight")])
