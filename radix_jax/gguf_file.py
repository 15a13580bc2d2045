"""The header of a GGUF file: its metadata, and the name, shape, type and place of each tensor.

Read here and not through `gguf.GGUFReader`, which spends seconds on a vocabulary and cannot say which tensor of a
damaged file is cut off. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

_READABLE_VERSIONS = (2, 3)
_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_STRING_LEN = struct.Struct("<Q")


class GGUFError(ValueError):
    """A GGUF file that is damaged, cut off, or of a form that is not read here."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF file.

    shape: numpy order, [out, in] for a matrix (the file stores it reversed).
    offset, num_bytes: where its data lies in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says before its data: metadata values as plain Python, arrays as lists; tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header of the GGUF file at `path`; no tensor data is read.

    Raises:
        GGUFError: not GGUF, damaged, or shorter than its header says; names the file, and the tensor if it is one.
        OSError: the file cannot be opened.
    """
    if path.stat().st_size == 0:
        raise GGUFError(f"{path} is empty: the download is incomplete; fetch the file again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _parse(path, data)
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError, RecursionError) as error:
            raise GGUFError(
                f"{path} is not a whole GGUF file ({error}): the download is incomplete or damaged; fetch it again"
            ) from error


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    if data[:4] != b"GGUF":
        raise GGUFError(f"{path} is not a GGUF file: it starts with {data[:4]!r}, not b'GGUF'")
    cursor = _Cursor(data, 4)
    version = cursor.scalar("<I")
    if version not in _READABLE_VERSIONS:
        raise GGUFError(f"{path} has GGUF version {version} (big-endian?); little-endian versions 2 and 3 are read")
    num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise GGUFError(f"{path}: general.alignment is {alignment!r}, not a positive number: the file is damaged")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_number, relative_offset in infos:
        if name in tensors:
            raise GGUFError(f"{path} lists tensor {name} twice: the file is damaged; fetch it again")
        tensors[name] = _checked_tensor(path, len(data), name, shape, type_number, data_start + relative_offset)
    return GGUFHeader(path=path, metadata=metadata, tensors=tensors)


def _tensor_info(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.scalar("<I")
    reversed_shape = [cursor.scalar("<Q") for _ in range(num_dims)]
    return name, tuple(reversed(reversed_shape)), cursor.scalar("<I"), cursor.scalar("<Q")


def _checked_tensor(
    path: Path, file_bytes: int, name: str, shape: tuple[int, ...], type_number: int, offset: int
) -> GGUFTensor:
    try:
        tensor_type = GGMLQuantizationType(type_number)
    except ValueError:
        raise GGUFError(f"{path}: tensor {name} has type number {type_number}, which this gguf library lacks") from None
    block_len, block_bytes = GGML_QUANT_SIZES[tensor_type]
    row_len = shape[-1] if shape else 1
    if row_len % block_len:
        raise GGUFError(
            f"{path}: tensor {name} of shape {shape} has rows of {row_len} values, "
            f"not a multiple of the {block_len} that {tensor_type.name} packs together"
        )
    num_bytes = math.prod(shape) // block_len * block_bytes
    if offset + num_bytes > file_bytes:
        raise GGUFError(
            f"{path} is cut off: tensor {name} needs bytes {offset} to {offset + num_bytes}, the file has "
            f"{file_bytes}; the download is incomplete, fetch the file again"
        )
    return GGUFTensor(name=name, shape=shape, type=tensor_type, offset=offset, num_bytes=num_bytes)


class _Cursor:
    """A place in the file that moves forward as values are read."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def scalar(self, form: str) -> Any:
        value = struct.unpack_from(form, self._data, self.offset)[0]
        self.offset += struct.calcsize(form)
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, length: int) -> list[str]:
        """`length` strings; in one loop, as vocabularies have hundreds of thousands."""
        data, num_bytes, offset, unpack = self._data, len(self._data), self.offset, _STRING_LEN.unpack_from
        found = []
        for _ in range(length):
            start = offset + _STRING_LEN.size
            offset = start + unpack(data, offset)[0]
            if offset > num_bytes:
                raise IndexError(f"a string of {offset - start} bytes at byte {start} reaches past its end")
            found.append(str(data[start:offset], "utf-8"))
        self.offset = offset
        return found

    def value(self, type_number: int) -> Any:
        if type_number == GGUFValueType.STRING:
            return self.string()
        if type_number == GGUFValueType.ARRAY:
            item_type, length = self.scalar("<I"), self.scalar("<Q")
            if item_type == GGUFValueType.STRING:
                return self.strings(length)
            form = _SCALARS.get(item_type)
            if form is None:
                return [self.value(item_type) for _ in range(length)]
            return self._numbers(length, np.dtype(form))
        form = _SCALARS.get(type_number)
        if form is None:
            raise IndexError(f"metadata of unknown type number {type_number} at byte {self.offset}")
        return self.scalar(form)

    def _numbers(self, length: int, dtype: np.dtype) -> list[Any]:
        end = self.offset + length * dtype.itemsize
        if end > len(self._data):
            raise IndexError(f"{length} numbers at byte {self.offset} reach past its end")
        values = np.frombuffer(self._data[self.offset : end], dtype).tolist()
        self.offset = end
        return values
