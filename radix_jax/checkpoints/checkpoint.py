"""Checkpoint: an opened file or folder of weights, its configuration and its tensors, without their data."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

CheckpointFormat = Literal["gguf", "safetensors"]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    shape: as stored, [out, in] for a matrix. dtype: the format's own name, e.g. "BF16", "Q4_1". file: where it lies.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path


@runtime_checkable
class TensorReader(Protocol):
    """What each format gives: the tensors by name, and their values piece by piece."""

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of the checkpoint by name."""
        ...

    def read_pieces(self, name: str) -> Iterator[np.ndarray]:
        """Values of a tensor as consecutive slices along its first axis, in a float type that holds them exactly."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint; a context manager.

    path: the .gguf file, or the folder.
    hf_config: the model's configuration under the keys of Hugging Face's config.json.
    eos_token_ids: every id that some file of the checkpoint names as the end of a sequence.
    """

    path: Path
    format: CheckpointFormat
    hf_config: dict[str, Any]
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    reader: TensorReader

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Shapes, types and files of all tensors, by name."""
        return self.reader.tensors

    def read_pieces(self, name: str) -> Iterator[np.ndarray]:
        """Values of tensor `name`, slice after slice along its first axis, so that no whole float copy is needed."""
        return self.reader.read_pieces(name)

    def close(self) -> None:
        """Close the checkpoint's files; harmless when done twice."""
        self.reader.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
