"""How byte-level vocabularies cut text before BPE, by the names that GGUF files give (`tokenizer.ggml.pre`).

The patterns are those of the models' own tokenizer.json files.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

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

    def set_up(self, core: Core) -> None:
        """Give `core` the normalizer and the pre-tokenizer of this kind."""
        if self.nfc:
            core.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])


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
