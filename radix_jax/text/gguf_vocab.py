"""Tokenizers from the metadata of a GGUF file: byte-level BPE with merges, and SentencePiece BPE with scores."""

import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Core

from radix_jax.gguf_file import read_gguf_header
from radix_jax.text.errors import TextError
from radix_jax.text.pre_tokenizer import PRE_TOKENIZERS
from radix_jax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Token types of GGUF.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_PREFIX = "tokenizer.ggml."
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in the GGUF file at `path`.

    Raises:
        TextError: the file holds none, or one of a kind that isn't built; names the kind.
        GGUFError: the file is damaged.
    """
    return tokenizer_of_metadata(path, read_gguf_header(path).metadata)


def tokenizer_of_metadata(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    """As load_gguf_tokenizer, from metadata that is already read; `path` is for messages.

    Raises:
        TextError: there is no tokenizer, or one of a kind that isn't built; names the kind.
    """
    values = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    kind, tokens = values.get("model"), values.get("tokens")
    if not kind or not tokens:
        raise TextError(f"{path} holds no tokenizer; give one with tokenizer=")
    types = values.get("token_type") or [_NORMAL] * len(tokens)
    _check(path, tokens, types, values)
    if kind == "gpt2":
        core, adds_bos = _byte_level_core(path, tokens, values)
    elif kind == "llama":
        core, adds_bos = _sentencepiece_core(path, tokens, types, values), True
    else:
        raise TextError(f"{path} has a tokenizer of kind {kind!r}; built are 'gpt2' (byte-level BPE) and 'llama'")
    by_type = list(zip(tokens, types, strict=True))
    special = [token for token, token_type in by_type if token_type in (_UNKNOWN, _CONTROL) and token]
    core.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    core.add_tokens(
        [AddedToken(token, normalized=False) for token, token_type in by_type if token_type == _USER_DEFINED and token]
    )
    return Tokenizer(
        core,
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=[values[key] for key in _EOS_KEYS if key in values],
        add_bos=values.get("add_bos_token", adds_bos),
        add_eos=values.get("add_eos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens={name: tokens[values[key]] for name, key in _SPECIAL_KEYS.items() if key in values},
    )


def _check(path: Path, tokens: list[str], types: list[int], values: dict[str, Any]) -> None:
    """Refuse lists of different lengths, tokens that are there twice, and ids outside the vocabulary."""
    if len(set(tokens)) != len(tokens):
        raise TextError(f"{path}: the vocabulary of {len(tokens)} tokens has only {len(set(tokens))} different ones")
    for name, per_token in (("token types", types), ("scores", values.get("scores", tokens))):
        if len(per_token) != len(tokens):
            raise TextError(f"{path}: the vocabulary has {len(tokens)} tokens and {len(per_token)} {name}")
    for key in (*_EOS_KEYS, *_SPECIAL_KEYS.values()):
        if key in values and not 0 <= values[key] < len(tokens):
            raise TextError(f"{path}: {key} {values[key]} is outside the vocabulary of {len(tokens)} tokens")


def _byte_level_core(path: Path, tokens: list[str], values: dict[str, Any]) -> tuple[Core, bool]:
    """Byte-level BPE, and whether BOS is added where the file doesn't say."""
    if "merges" not in values:
        raise TextError(f"{path} has a byte-level vocabulary without merges; give a tokenizer with tokenizer=")
    if "pre" not in values:
        logger.warning("%s names no pre-tokenizer; 'default' is used, and some texts may be cut otherwise", path)
    pre = values.get("pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise TextError(
            f"{path} asks for pre-tokenizer {pre!r}, which is not built (built are {', '.join(PRE_TOKENIZERS)}); "
            "give the model's tokenizer with tokenizer="
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in values["merges"])]
    for left, right in merges:
        if not (left in vocab and right in vocab and left + right in vocab):
            raise TextError(f"{path} has a malformed merge {left!r} + {right!r}; they must join to a third token")
    core = Core(models.BPE(vocab=vocab, merges=merges, ignore_merges=PRE_TOKENIZERS[pre].takes_whole_words))
    PRE_TOKENIZERS[pre].set_up(core)
    core.decoder = decoders.ByteLevel()
    return core, PRE_TOKENIZERS[pre].adds_bos


def _sentencepiece_core(path: Path, tokens: list[str], types: list[int], values: dict[str, Any]) -> Core:
    """SentencePiece BPE: the pair whose joined token has the highest score is merged first."""
    if "scores" not in values:
        raise TextError(f"{path} has a SentencePiece vocabulary without scores; give a tokenizer with tokenizer=")
    if values.get("remove_extra_whitespaces"):
        raise TextError(f"{path} asks for remove_extra_whitespaces, which is not built; give a tokenizer=")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    scored = zip(tokens, values["scores"], types, strict=True)
    normal = {token: score for token, score, token_type in scored if token_type == _NORMAL}
    core = Core(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(normal),
            unk_token=tokens[values.get("unknown_token_id", 0)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space_to_mark = normalizers.Replace(" ", "▁")
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.get("add_space_prefix", True):
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space_to_mark])
        core.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)])
    else:
        core.normalizer = space_to_mark
        core.decoder = decoders.Sequence(undo)
    return core


def _merges_by_score(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best joined token first."""
    found = [
        (-score, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [(left, right) for _, left, right in sorted(found, key=lambda entry: entry[0])]
