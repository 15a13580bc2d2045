"""Safetensors files, written and read piece by piece, so that no tensor has to fit in memory.

The format is that of https://github.com/huggingface/safetensors: the header's length in 8 bytes, a header of JSON, and
the values of all tensors in its order.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes  # noqa: F401  (makes bfloat16 and float8 types that numpy knows)
import numpy as np

_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int32": "I32",
    "int64": "I64",
    "uint32": "U32",
    "uint8": "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorToWrite:
    """dtype: numpy's name for it. pieces: its values in order, in arrays of that dtype, each asked for in its turn."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a file. start: where its values begin, in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Of one index of the first axis."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize


def write_tensor_file(path: Path, metadata: dict[str, str], tensors: Mapping[str, TensorToWrite]) -> None:
    """Write a file that is there whole or not at all: a temporary one beside it takes its name once it is complete.

    Raises:
        OSError: it can't be written; what was there before still is.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            header = _header(metadata, tensors)
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            for name, tensor in tensors.items():
                num_bytes = 0
                for piece in tensor.pieces:
                    assert piece.dtype == np.dtype(tensor.dtype), f"{name} has a piece of {piece.dtype}"
                    num_bytes += file.write(piece.tobytes())
                assert num_bytes == tensor.num_bytes, f"{name} has {num_bytes} bytes of {tensor.num_bytes}"
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class TensorFile:
    """A file of tensors, open for reading; a context manager.

    metadata: of the file. tensors: where each lies.

    Raises:
        OSError: it can't be read. ValueError: it is no such file, is cut off, or its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        try:
            self.metadata, self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) of a tensor, all of it by default.

        Raises:
            ValueError: there is no such tensor.
        """
        if name not in self.tensors:
            raise self._damaged(f"it has no tensor {name!r}")
        place = self.tensors[name]
        num_rows = (place.shape[0] if stop is None else stop) - start
        self._file.seek(place.start + start * place.row_bytes)
        values = self._file.read(num_rows * place.row_bytes)
        return np.frombuffer(values, place.dtype).reshape(num_rows, *place.shape[1:])

    def _read_header(self) -> tuple[dict[str, str], dict[str, TensorPlace]]:
        file_bytes = os.fstat(self._file.fileno()).st_size
        header_bytes = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
        end = _LENGTH_BYTES + header_bytes
        if end > file_bytes:
            raise self._damaged(f"its header would end at byte {end} of {file_bytes}")
        try:
            header: dict[str, Any] = json.loads(self._file.read(header_bytes))
            metadata = header.pop("__metadata__", {})
            if not isinstance(metadata, dict):
                raise ValueError("its metadata is no object")
            tensors = {}
            for name, entry in header.items():
                dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(map(int, entry["shape"]))
                tensors[name] = TensorPlace(dtype, shape, end)
                end += int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                if entry["data_offsets"][1] != end - _LENGTH_BYTES - header_bytes or min(shape, default=-1) < 0:
                    raise ValueError(f"tensor {name} is not where its shape says")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"its header can't be read: {error}") from error
        if end != file_bytes:
            raise self._damaged(f"it has {file_bytes} bytes where its header says {end}")
        return metadata, tensors

    def _damaged(self, why: str) -> ValueError:
        return ValueError(f"{self._path} is cut off, damaged, or no safetensors file ({why}); make it anew")


def _header(metadata: dict[str, str], tensors: Mapping[str, TensorToWrite]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.num_bytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)
