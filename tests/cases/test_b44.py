"""Llama 3 runs on: the ids that end a text are those that any file names, as a number or as a list."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_files import LLAMA_METADATA, byte_level_core, write_gguf, write_json

from radix_jax.checkpoints import open_checkpoint
from radix_jax.text import Tokenizer, load_tokenizer

TOKEN_5, TOKEN_9 = {"id": 5, "content": "<five>"}, {"id": 9, "content": "<nine>"}
VOCAB = {"added_tokens": [TOKEN_5, TOKEN_9], "model": {"vocab": {"</s>": 2}}}


def folder_of(tmp_path: Path, **files: Any) -> Path:
    """A checkpoint folder with NAME.json for each keyword."""
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    for name, content in {"config": {}, "tokenizer": VOCAB, **files}.items():
        write_json(tmp_path / f"{name}.json", content)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "config": {"eos_token_id": 5},
                "generation_config": {"eos_token_id": [5, 9]},
                "tokenizer_config": {"eos_token": "<five>"},
            },
            {5, 9},
        ),
        ({"config": {"eos_token_id": 9}, "generation_config": {"eos_token_id": 5}}, {5, 9}),
        ({"config": {"eos_token_id": [9]}, "tokenizer_config": {"eos_token": "<five>"}}, {5, 9}),
        ({"config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": {"content": "<nine>"}}}, {5, 9}),
        ({"config": {"eos_token_id": 5}, "special_tokens_map": {"eos_token": "<nine>"}}, {5, 9}),
        ({"config": {"text_config": {"eos_token_id": [5, 9]}}}, {5, 9}),
        ({"generation_config": {"eos_token_id": 9}}, {9}),
        ({"tokenizer_config": {"eos_token": "</s>"}}, {2}),
        (
            {
                "tokenizer_config": {
                    "eos_token": "<moved>",
                    "added_tokens_decoder": {"7": {"content": "<moved>"}, "8": {"content": "<other>"}},
                }
            },
            {7},
        ),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": None}}, set()),
        ({"tokenizer_config": {"eos_token": "<unknown>"}}, set()),
    ],
)
def test_union_of_what_the_files_name(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    with open_checkpoint(folder_of(tmp_path, **files)) as checkpoint:
        assert checkpoint.eos_token_ids == expected


def test_gguf_names_them_in_three_keys(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 9}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", LLAMA_METADATA | ids, {})) as checkpoint:
        assert checkpoint.eos_token_ids == {5, 9}


def test_no_special_text_leaks() -> None:
    core = byte_level_core(specials=("<five>", "<nine>"))
    tokenizer = Tokenizer(core, eos_token_ids=[256, 257])
    assert tokenizer.decode([104, 105, 257]) == "hi"


def test_the_tokenizer_names_its_own(tmp_path: Path) -> None:
    byte_level_core(specials=("<five>", "<nine>")).save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<nine>"})
    assert load_tokenizer(tmp_path).eos_token_ids == {257}
