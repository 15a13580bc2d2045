"""Tokenizers in a Hugging Face folder: tokenizer.json, tokenizer_config.json and their companions."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from radix_jax.text.errors import TextError
from radix_jax.text.tokenizer import Tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_hf_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`.

    Raises:
        TextError: tokenizer.json is missing, or a file is damaged; names it.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        there = ", ".join(sorted(file.name for file in folder.glob("tokenizer*"))) or "none"
        raise TextError(
            f"{folder} has no tokenizer.json (tokenizer files there: {there}); fetch it, or make it with "
            "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class
        raise TextError(f"{path} cannot be read ({error}): the download is incomplete or damaged") from error
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(config)
    eos_token_id = _token_id(core, special_tokens.get("eos_token"))
    return Tokenizer(
        core,
        bos_token_id=_token_id(core, special_tokens.get("bos_token")),
        eos_token_ids=() if eos_token_id is None else (eos_token_id,),
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
        chat_template=_chat_template(folder, config),
        special_tokens=special_tokens,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TextError(f"{path} is not valid JSON ({error}): the download is incomplete or damaged") from error
    if not isinstance(content, dict):
        raise TextError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens that a config names, as strings or as objects with their `content`."""
    found = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _token_id(core: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else core.token_to_id(token)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template in a file of its own, else the one in tokenizer_config.json; the "default" one of several."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        if "default" not in named:
            raise TextError(f"{folder} has chat templates {', '.join(map(str, named))}, and none named 'default'")
        return named["default"]
    return template
