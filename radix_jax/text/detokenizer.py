"""Text of a growing list of tokens, piece by piece and never half a character."""

import codecs
from collections.abc import Iterable
from operator import index
from typing import Protocol, SupportsIndex, runtime_checkable

from radix_jax.text.foreign import AnyTokenizer, ForeignTokenizer
from radix_jax.text.tokenizer import Tokenizer

# A character is at most 4 bytes, so the start of an unfinished one shows as at most 3 replacement characters.
_UNFINISHED_MARK = "\N{REPLACEMENT CHARACTER}"
_MOST_UNFINISHED = 3
_WINDOW_KEPT, _WINDOW_FULL = 8, 64


class IncrementalDetokenizer:
    """Decodes the tokens of one completion as they come; constant work a token.

    The pieces that `push` and `finish` return, joined, are `tokenizer.decode` of all ids. For a tokenizer whose
    tokens have no bytes of their own (one of another library) that holds as far as its `decode` of a token depends on
    no more than the last few.
    """

    def __init__(self, tokenizer: AnyTokenizer, skip_special_tokens: bool = True) -> None:
        if isinstance(tokenizer, Tokenizer) and tokenizer.has_bytes:
            self._decoder: _Decoder = _ByteDecoder(tokenizer, skip_special_tokens)
        else:
            self._decoder = _WindowDecoder(tokenizer, skip_special_tokens)

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        """The text that `ids` complete; the start of an unfinished character is held back."""
        return self._decoder.push([index(token_id) for token_id in ids])

    def finish(self) -> str:
        """What was held back: an unfinished character, as decoding the whole shows it. Nothing may be pushed after."""
        return self._decoder.finish()


@runtime_checkable
class _Decoder(Protocol):
    def push(self, ids: list[int]) -> str: ...

    def finish(self) -> str: ...


class _ByteDecoder:
    """Joins the bytes of the tokens and decodes them as they complete characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_leading_space

    def push(self, ids: list[int]) -> str:
        kept = (self._tokenizer.token_bytes(token_id) for token_id in ids if token_id not in self._skipped)
        return self._strip(self._utf8.decode(b"".join(kept)))

    def finish(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class _WindowDecoder:
    """Decodes the last few tokens again with each new one, and gives out what was added to their text."""

    def __init__(self, tokenizer: Tokenizer | ForeignTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._given_len = 0

    def push(self, ids: list[int]) -> str:
        self._window += ids
        text = self._decode()
        unfinished = len(text) - len(text.rstrip(_UNFINISHED_MARK))
        stable_len = len(text) - min(unfinished, _MOST_UNFINISHED)
        new = text[self._given_len : stable_len]
        self._given_len = max(self._given_len, stable_len)
        if len(self._window) > _WINDOW_FULL:
            held_len = len(text) - self._given_len
            self._window = self._window[-_WINDOW_KEPT:]
            self._given_len = len(self._decode()) - held_len
        return new

    def finish(self) -> str:
        return self._decode()[self._given_len :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)
