"""Tokenizers from the metadata of a GGUF file: byte-level BPE with merges, and SentencePiece BPE with scores."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from radix_jax.gguf_file import read_gguf_header
from radix_jax.text.errors import TextError
from radix_jax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Token types of GGUF.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL_TYPES = (_UNKNOWN, _CONTROL)

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before BPE: each pattern in turn isolates its matches inside the pieces so far.

    takes_whole_words: a word that is a token is taken as it is, whatever the merges say.
    adds_bos: whether BOS is added where the file doesn't say.
    nfc: the text is normalised to NFC first.
    """

    patterns: tuple[str, ...]
    takes_whole_words: bool = False
    adds_bos: bool = False
    nfc: bool = False


_DIGIT_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = PreTokenizer((_CONTRACTIONS + r"|\p{N}{1,3}" + _TAIL,), takes_whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((_CONTRACTIONS + r"|\p{N}" + _TAIL,), nfc=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2_WORDS,)),
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "command-r": PreTokenizer(_DIGIT_BY_DIGIT.patterns, nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer(
        (
            f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        takes_whole_words=True,
        adds_bos=True,
    ),
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

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, tokens = get("model"), get("tokens")
    if not kind or not tokens:
        raise TextError(f"{path} holds no tokenizer; give one with tokenizer=")
    if len(set(tokens)) != len(tokens):
        raise TextError(f"{path}: the vocabulary of {len(tokens)} tokens has only {len(set(tokens))} different ones")
    types = get("token_type") or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        core, adds_bos = _byte_level_core(path, tokens, get("merges"), get("pre"))
    elif kind == "llama":
        core, adds_bos = _sentencepiece_core(path, tokens, types, get), True
    else:
        raise TextError(f"{path} has a tokenizer of kind {kind!r}; built are 'gpt2' (byte-level BPE) and 'llama'")
    for is_special in (True, False):
        of_kind = _SPECIAL_TYPES if is_special else (_USER_DEFINED,)
        contents = [token for token, token_type in zip(tokens, types, strict=True) if token_type in of_kind and token]
        added = [AddedToken(content, normalized=False, special=is_special) for content in contents]
        (core.add_special_tokens if is_special else core.add_tokens)(added)
    special_ids = {name: get(key) for name, key in _SPECIAL_KEYS.items()}
    eos_token_ids = [get(key) for key in _EOS_KEYS]
    return Tokenizer(
        core,
        bos_token_id=special_ids["bos_token"],
        eos_token_ids=[token_id for token_id in eos_token_ids if token_id is not None],
        add_bos=get("add_bos_token", adds_bos),
        add_eos=get("add_eos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens={name: tokens[token_id] for name, token_id in special_ids.items() if token_id is not None},
    )


_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _byte_level_core(path: Path, tokens: list[str], merges: list[str] | None, pre: str | None) -> tuple[Core, bool]:
    """Byte-level BPE, and whether BOS is added where the file doesn't say."""
    if merges is None:
        raise TextError(f"{path} has a byte-level vocabulary without merges; give a tokenizer with tokenizer=")
    if pre is None:
        logger.warning("%s names no pre-tokenizer; 'default' is used, and some texts may be cut otherwise", path)
        pre = "default"
    if pre not in PRE_TOKENIZERS:
        raise TextError(
            f"{path} asks for pre-tokenizer {pre!r}, which is not built (built are {', '.join(PRE_TOKENIZERS)}); "
            "give the model's tokenizer with tokenizer="
        )
    rules = PRE_TOKENIZERS[pre]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [_pair(path, merge) for merge in merges]
    core = Core(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rules.takes_whole_words))
    if rules.nfc:
        core.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    core.decoder = decoders.ByteLevel()
    return core, rules.adds_bos


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise TextError(f"{path} has a malformed merge {merge!r}; it must be two tokens and a space between them")
    return left, right


def _sentencepiece_core(path: Path, tokens: list[str], types: list[int], get: Any) -> Core:
    """SentencePiece BPE: the pair whose joined token has the highest score is merged first."""
    scores = get("scores")
    if scores is None:
        raise TextError(f"{path} has a SentencePiece vocabulary without scores; give a tokenizer with tokenizer=")
    if get("remove_extra_whitespaces", False):
        raise TextError(f"{path} asks for remove_extra_whitespaces, which is not built; give a tokenizer=")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    normal = {token: scores[i] for i, token in enumerate(tokens) if types[i] == _NORMAL}
    unknown_id = get("unknown_token_id", 0)
    core = Core(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(normal),
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space_to_mark = normalizers.Replace(" ", "▁")
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if get("add_space_prefix", True):
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
