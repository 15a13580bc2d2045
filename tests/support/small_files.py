"""Small GGUF files, safetensors folders and tokenizers that tests write for themselves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

LLAMA_METADATA: dict[str, Any] = {
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 96,
    "llama.block_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 128,
    "llama.vocab_size": 9,
}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, GGMLQuantizationType]],
    arch: str = "llama",
) -> Path:
    """Write a GGUF file with the library's own writer; a tensor is an array, or packed bytes and their type."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add_metadata(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a Python value as the GGUF type that converters use for it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def quantized(values: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, GGMLQuantizationType]:
    """`values` packed as `kind`, by the library."""
    return gguf.quants.quantize(values, kind), kind


def write_json(path: Path, content: Any) -> Path:
    """Write `content` as JSON."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_shards(folder: Path, shards: Sequence[Mapping[str, np.ndarray]]) -> list[Path]:
    """A sharded safetensors checkpoint in `folder` with its index and an empty config; the files, in order."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    weight_map = {}
    for path, tensors in zip(paths, shards, strict=True):
        save_file(dict(tensors), path)
        weight_map |= dict.fromkeys(tensors, path.name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(folder / "config.json", {"architectures": ["LlamaForCausalLM"]})
    return paths


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself if printable, else from U+0100 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(char): char for char in alphabet if ord(char) < 256}
    others = iter(char for char in alphabet if ord(char) >= 256)
    return [own.get(byte) or next(others) for byte in range(256)]


def byte_level_core(pieces: Sequence[bytes] = (), specials: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """A byte-level BPE of 256 one-byte tokens (id = byte), then `pieces` in order, then special tokens.

    Pieces may be any bytes, so that a token can be half a character. Those of two bytes are merges; longer ones are
    in no text's ids, but a model may still emit them.
    """
    alphabet = byte_alphabet()
    spelled = ["".join(alphabet[byte] for byte in piece) for piece in pieces]
    vocab = {char: byte for byte, char in enumerate(alphabet)} | {piece: 256 + i for i, piece in enumerate(spelled)}
    merges = [(piece[0], piece[1]) for piece in spelled if len(piece) == 2]
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(specials))
    return core
