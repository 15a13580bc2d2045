"""Tokenizer: text to token ids and back, and conversations to ids by the model's chat template."""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from operator import index
from typing import SupportsIndex

import numpy as np
import tokenizers
from jaxtyping import Int32

from radix_jax.text.byte_table import ByteSpelling, bytes_of_piece
from radix_jax.text.chat import ChatTemplate
from radix_jax.text.errors import TextError

TokenIds = Int32[np.ndarray, " T"]


class Tokenizer:
    """A model's tokenizer over the `tokenizers` library, with its special tokens and chat template.

    Args:
        core: the vocabulary and its rules; kept, and never changed by the caller afterwards.
        bos_token_id, eos_token_ids: start of a sequence, ends of one.
        add_bos, add_eos: whether plain text is wrapped in them; None leaves it to the post-processor of `core`.
        chat_template: Jinja source.
        special_tokens: name -> text, e.g. {"bos_token": "<s>"}, as chat templates print them.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._core = core
        # A file may carry the limits of its training; text is never clipped or padded here.
        core.no_truncation()
        core.no_padding()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.chat_template = chat_template
        self._chat = ChatTemplate(chat_template, special_tokens or {}) if chat_template else None
        added = core.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._spelling: ByteSpelling | None
        self._spelling, self.strips_leading_space = _spelling_of(core)
        self._bytes_of_id: dict[int, bytes] = {}
        prefix, suffix = _added_around_text(core)
        self._prefix = _with_or_without(prefix, bos_token_id, add_bos, at_start=True)
        eos_token_id = min(self.eos_token_ids, default=None)
        self._suffix = _with_or_without(suffix, eos_token_id, add_eos, at_start=False)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, added ones included; a model may have more rows, which no text maps to."""
        return self._core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> TokenIds:
        """Token ids of `text`, int32 [T]; T may be 0.

        With `add_special_tokens` the text is wrapped as the model expects (BOS for most). A text that already starts
        with BOS, such as a rendered chat template, gets no second one.

        Raises:
            TextError: the text holds half of a surrogate pair.
            TypeError: `text` is not a str.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is a {type(text).__name__}, not a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"text holds half of a surrogate pair at character {error.start}; it is not text") from None
        ids = self._core.encode(text, add_special_tokens=False).ids
        if add_special_tokens:
            prefix = self._prefix
            if ids and ids[0] == self.bos_token_id:
                prefix = [token_id for token_id in prefix if token_id != self.bos_token_id]
            ids = [*prefix, *ids, *self._suffix]
        return np.asarray(ids, np.int32)

    def encode_chat(self, messages: object, add_generation_prompt: bool = True) -> TokenIds:
        """Token ids of a conversation, int32 [T]: exactly what the chat template prints, with nothing added.

        Raises:
            TextError: there is no template, it refuses the messages, or they are malformed.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def render_chat(self, messages: object, add_generation_prompt: bool = True) -> str:
        """A conversation as the text that the chat template makes of it.

        Raises:
            TextError: there is no template, it refuses the messages, or they are malformed.
        """
        if self._chat is None:
            raise TextError("this tokenizer has no chat template; write the prompt yourself and complete it as text")
        return self._chat.render(messages, add_generation_prompt)

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD; ids without a token have no text.

        Raises:
            ValueError: a negative id.
        """
        kept = [index(token_id) for token_id in ids]
        if not self.has_bytes:
            return self._core.decode(kept, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens:
            kept = [token_id for token_id in kept if token_id not in self.special_ids]
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    @property
    def has_bytes(self) -> bool:
        """Every token stands for fixed bytes, so that text is their concatenation."""
        return self._spelling is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; those of a special token are its name.

        Raises:
            ValueError: a negative id.
        """
        known = self._bytes_of_id.get(token_id)
        if known is None:
            known = self._bytes_of_id[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None and self._spelling == "byte-level":
            return added.encode()
        piece = self.id_to_token(token_id)
        if piece is None:
            return b""
        return bytes_of_piece(piece, self._spelling) if self._spelling else piece.encode()

    def id_to_token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id without one.

        Raises:
            ValueError: a negative id.
        """
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        return self._core.id_to_token(token_id)

    @cached_property
    def eos_token_id(self) -> int | None:
        """The end of a sequence, where one id is asked for; the lowest of `eos_token_ids`."""
        return min(self.eos_token_ids, default=None)


def _spelling_of(core: tokenizers.Tokenizer) -> tuple[ByteSpelling | None, bool]:
    """How the decoder of `core` spells bytes, and whether it strips the space that encoding put before the text."""
    if core.decoder is None:
        return None, False
    decoder = json.loads(core.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return "byte-level", False
    for part in parts:
        if part["type"] == "Metaspace" and kinds <= {"Metaspace", "ByteFallback", "Fuse"}:
            return "sentencepiece", part.get("prepend_scheme", "always") != "never"
    is_word_start = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if is_word_start in parts and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return "sentencepiece", any(part["type"] == "Strip" and part["start"] == 1 for part in parts)
    return None, False


def _added_around_text(core: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the post-processor of `core` puts before and after a text."""
    probe = core.encode("a", add_special_tokens=True)
    of_text = [place for place, sequence in enumerate(probe.sequence_ids) if sequence is not None]
    if not of_text:
        return list(probe.ids), []
    return probe.ids[: of_text[0]], probe.ids[of_text[-1] + 1 :]


def _with_or_without(ids: list[int], token_id: int | None, wanted: bool | None, *, at_start: bool) -> list[int]:
    """`ids` with `token_id` at its outer end if wanted, without it if not; as they are if `wanted` is None."""
    if token_id is None or wanted is None:
        return ids
    rest = [other for other in ids if other != token_id]
    if not wanted:
        return rest
    return [token_id, *rest] if at_start else [*rest, token_id]
