"""Checkpoints in a folder of safetensors, sharded or not, beside a Hugging Face config.json."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes bfloat16 a type that numpy knows)
import numpy as np
from safetensors import SafetensorError, safe_open

from radix_jax.checkpoints.checkpoint import Checkpoint, TensorInfo
from radix_jax.checkpoints.eos import bos_token_id_of, eos_token_ids_of
from radix_jax.checkpoints.errors import CheckpointError
from radix_jax.checkpoints.json_file import read_json

_PIECE_VALUES = 1 << 20
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


def open_safetensors(folder: Path) -> Checkpoint:
    """Open the safetensors checkpoint in `folder`.

    Raises:
        CheckpointError: a file is missing, damaged or cut off, or a tensor is not where the index says.
    """
    return Checkpoint(
        path=folder,
        format="safetensors",
        hf_config=read_json(folder / "config.json"),
        eos_token_ids=eos_token_ids_of(folder),
        bos_token_id=bos_token_id_of(folder),
        reader=SafetensorsFolder(folder),
    )


class SafetensorsFolder:
    """Tensors of a folder: those of the files that the index lists, or of model.safetensors."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[Path, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        index = _index(folder)
        missing = [name for name in sorted(set(index.values())) if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {', '.join(missing)}, which {_INDEX_FILE} lists: "
                "the download is incomplete; fetch the folder again"
            )
        try:
            for name in sorted(set(index.values())) or [_SINGLE_FILE]:
                self._add_file(folder / name)
            self._check_index(folder, index)
        except CheckpointError:
            self.close()
            raise

    def _add_file(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="numpy")
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is cut off or damaged ({error}): the download is incomplete; fetch the file again"
            ) from error
        self._files[path] = file
        for name in file.keys():  # noqa: SIM118  (not a dict)
            if name in self.tensors:
                raise CheckpointError(f"tensor {name} is in both {self.tensors[name].file} and {path}")
            stored = file.get_slice(name)
            self.tensors[name] = TensorInfo(shape=tuple(stored.get_shape()), dtype=stored.get_dtype(), file=path)

    def _check_index(self, folder: Path, index: dict[str, str]) -> None:
        for name, file_name in index.items():
            if name not in self.tensors or self.tensors[name].file != folder / file_name:
                raise CheckpointError(
                    f"{folder / file_name} lacks tensor {name}, which {_INDEX_FILE} places there: "
                    "the download is incomplete or mixes two models; fetch the folder again"
                )

    def read_pieces(self, name: str) -> Iterator[np.ndarray]:
        """Values of tensor `name` in slices of about a million, in the stored float type.

        Raises:
            CheckpointError: the tensor isn't made of 16, 32 or 64-bit floats.
        """
        info = self.tensors[name]
        if info.dtype not in _FLOAT_DTYPES:
            raise CheckpointError(
                f"{info.file}: tensor {name} has type {info.dtype}; {', '.join(_FLOAT_DTYPES)} are read: "
                "use a checkpoint that isn't quantised"
            )
        file = self._files.get(info.file)
        if file is None:
            raise CheckpointError(f"{info.file} is closed; open the checkpoint again to read tensor {name}")
        if not info.shape:
            yield file.get_tensor(name)
            return
        stored = file.get_slice(name)
        piece_len = max(1, _PIECE_VALUES // max(1, int(np.prod(info.shape[1:]))))
        for start in range(0, info.shape[0], piece_len):
            yield stored[start : min(start + piece_len, info.shape[0])]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files = {}


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name by the index; empty for a folder with the single file."""
    if (folder / _INDEX_FILE).is_file():
        weight_map = read_json(folder / _INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / _INDEX_FILE} has no weight_map: fetch the folder again")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(f"{folder / _INDEX_FILE} places tensor {name} in {file_name!r}, not a file name")
        return weight_map
    if not (folder / _SINGLE_FILE).is_file():
        there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise CheckpointError(f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; it holds {there}")
    return {}
