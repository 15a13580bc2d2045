"""The ids that end a sequence, gathered from every file of a Hugging Face folder that names one."""

from pathlib import Path
from typing import Any

from radix_jax.checkpoints.errors import CheckpointError
from radix_jax.checkpoints.json_file import read_json_if_present


def eos_token_ids_of(folder: Path) -> frozenset[int]:
    """Union of the end-of-sequence ids of config.json, generation_config.json and the tokenizer's files.

    A model may name one id in one file and another one in the next; each of them ends the text.

    Raises:
        CheckpointError: a file is damaged, or names something that is not a token id.
    """
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        content = read_json_if_present(folder / name)
        ids |= _ids(folder / name, content.get("eos_token_id"))
        text_config = content.get("text_config")
        if isinstance(text_config, dict):
            ids |= _ids(folder / name, text_config.get("eos_token_id"))
    tokenizer_config = read_json_if_present(folder / "tokenizer_config.json")
    special_tokens = read_json_if_present(folder / "special_tokens_map.json")
    for token in (tokenizer_config.get("eos_token"), special_tokens.get("eos_token")):
        token_id = _id_of_token(folder, tokenizer_config, _content(token))
        if token_id is not None:
            ids.add(token_id)
    return frozenset(ids)


def bos_token_id_of(folder: Path) -> int | None:
    """The id that starts a sequence, by config.json or else generation_config.json; None where neither names one.

    Raises:
        CheckpointError: a file is damaged, or names something that is not a token id.
    """
    for name in ("config.json", "generation_config.json"):
        ids = _ids(folder / name, read_json_if_present(folder / name).get("bos_token_id"))
        if ids:
            return min(ids)
    return None


def _ids(path: Path, value: object) -> set[int]:
    if value is None:
        return set()
    ids: set[int] = set()
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, bool) or not isinstance(item, int):
            raise CheckpointError(f"{path} names {item!r} as a special token id; it must be an int or a list of ints")
        ids.add(item)
    return ids


def _content(token: object) -> str | None:
    """Text of a token that is written as a string or as an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _id_of_token(folder: Path, tokenizer_config: dict[str, Any], content: str | None) -> int | None:
    if content is None:
        return None
    for token_id, token in tokenizer_config.get("added_tokens_decoder", {}).items():
        if _content(token) == content:
            return int(token_id)
    tokenizer = read_json_if_present(folder / "tokenizer.json")
    for token in tokenizer.get("added_tokens", []):
        if token.get("content") == content:
            return int(token["id"])
    vocab = tokenizer.get("model", {}).get("vocab", {})
    return vocab.get(content) if isinstance(vocab, dict) else None
