"""The GGUF header reader against the library's own, and every way in which a file can be damaged."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from small_files import quantized, write_gguf

from radix_jax.gguf_file import GGUFError, read_gguf_header

METADATA = {
    "a.text": "naïve ▁ 🧪",
    "a.empty": "",
    "a.flag": True,
    "a.number": 4_000_000_000,
    "a.float": 0.5,
    "a.texts": ["x", "", "né"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.25, -1.5],
    "a.flags": [True, False],
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "vector": rng.normal(size=7).astype(np.float32),
        "half": rng.normal(size=(3, 5)).astype(np.float16),
        "cube": rng.normal(size=(2, 3, 4)).astype(np.float32),
        "packed": quantized(rng.normal(size=(4, 64)).astype(np.float32), GGMLQuantizationType.Q8_0),
    }
    return write_gguf(tmp_path / "whole.gguf", METADATA, tensors)


def test_header_equals_the_library_s(whole: Path) -> None:
    header = read_gguf_header(whole)
    library = GGUFReader(whole)
    theirs = {key: field.contents() for key, field in library.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    assert header.metadata["a.texts"] == METADATA["a.texts"]
    assert list(header.tensors) == [tensor.name for tensor in library.tensors]
    for tensor in library.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (ours.type, ours.offset, ours.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)


def test_every_cut_is_an_error_that_names_the_file(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    last = max(tensor.offset + tensor.num_bytes for tensor in read_gguf_header(whole).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(last):
        cut.write_bytes(content[:length])
        with pytest.raises(GGUFError, match=r"cut\.gguf"):
            read_gguf_header(cut)
    cut.write_bytes(content[:last])
    assert len(read_gguf_header(cut).tensors) == 4


def test_a_cut_tensor_is_named_with_its_numbers(whole: Path, tmp_path: Path) -> None:
    packed = read_gguf_header(whole).tensors["packed"]
    end = packed.offset + packed.num_bytes
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[: end - 1])
    with pytest.raises(GGUFError, match=rf"tensor packed needs bytes {packed.offset} to {end}, the file has {end - 1}"):
        read_gguf_header(cut)
    with pytest.raises(GGUFError, match="download is incomplete"):
        read_gguf_header(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"<html>not here</html>", "not a GGUF file: it starts with b'<htm'"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "version 50331648"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "not a whole GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "not a whole GGUF file"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "unknown type number 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**61), "reach past its end"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 5000, "recursion"),
    ],
)
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message) as caught:
        read_gguf_header(path)
    assert str(path) in str(caught.value)


def raw_tensor_info(name: bytes, shape: tuple[int, ...], type_number: int) -> bytes:
    """One tensor info as the format lays it out; `shape` in the file's order."""
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", type_number, 0)
    )


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([raw_tensor_info(b"odd", (4,), 9999)], "tensor odd has type number 9999"),
        ([raw_tensor_info(b"ragged", (33, 2), GGMLQuantizationType.Q8_0)], "tensor ragged .* multiple of the 32"),
        ([raw_tensor_info(b"twin", (1,), 0)] * 2, "lists tensor twin twice"),
        ([raw_tensor_info(b"vast", (2**62, 2**62), 0)], "tensor vast needs bytes"),
    ],
)
def test_impossible_tensors_are_named(tmp_path: Path, infos: list[bytes], message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0) + b"".join(infos) + bytes(64))
    with pytest.raises(GGUFError, match=message):
        read_gguf_header(path)


@pytest.mark.parametrize("alignment", [0, "x"])
def test_impossible_alignment_is_refused(tmp_path: Path, alignment: int | str) -> None:
    path = write_gguf(tmp_path / "bad.gguf", {"general.alignmenT": alignment}, {})
    path.write_bytes(path.read_bytes().replace(b"alignmenT", b"alignment"))
    with pytest.raises(GGUFError, match=f"general.alignment is {alignment!r}"):
        read_gguf_header(path)


def test_own_alignment_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    library = {tensor.name: tensor.data_offset for tensor in GGUFReader(path).tensors}
    assert {name: tensor.offset for name, tensor in read_gguf_header(path).tensors.items()} == library
