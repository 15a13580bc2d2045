"""Files of tensors: read by the safetensors library, whole or not at all, and damaged ones refused."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from radix_jax.tensor_file import TensorFile, TensorToWrite, write_tensor_file

A = np.arange(12, dtype=np.int32).reshape(3, 4)
B = np.arange(5, dtype=np.float16)
EMPTY = np.empty((0, 7), np.int64)


def write(path: Path) -> Path:
    pieces = {"a": [A[:1], A[1:]], "b": [B], "empty": []}
    tensors = {
        name: TensorToWrite(whole.dtype.name, whole.shape, pieces[name])
        for name, whole in (("a", A), ("b", B), ("empty", EMPTY))
    }
    write_tensor_file(path, {"said": "so"}, tensors)
    return path


def test_the_library_and_the_reader_find_what_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "x")
    theirs = load_file(path)
    with TensorFile(path) as file:
        assert file.metadata == {"said": "so"}
        assert list(file.tensors) == ["a", "b", "empty"]
        for name, array in (("a", A), ("b", B), ("empty", EMPTY)):
            for read in (theirs[name], file.read(name)):
                np.testing.assert_array_equal(read, array, strict=True)
        np.testing.assert_array_equal(file.read("a", 1, 2), A[1:2], strict=True)
        with pytest.raises(ValueError, match="has no tensor 'c'"):
            file.read("c")
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_what_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def failing() -> Iterator[np.ndarray]:
        yield A[:1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensor_file(path, {}, {"a": TensorToWrite("int32", A.shape, failing())})
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(OSError, match="nowhere"):
        write_tensor_file(tmp_path / "nowhere" / "x", {}, {})


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "x").read_bytes()
    cut = tmp_path / "cut"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut off, damaged, or no safetensors file"):
            TensorFile(cut)
    cut.write_bytes(whole + b"0")
    with pytest.raises(ValueError, match="where its header says"):
        TensorFile(cut)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"not JSON",
        b"\xff",
        b'{"__metadata__": 3}',
        b'{"a": 3}',
        b'{"a": {"dtype": "X", "shape": [], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "I32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "I32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "I32", "shape": "1", "data_offsets": 4}}',
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="cut off, damaged, or no safetensors file"):
        TensorFile(path)
