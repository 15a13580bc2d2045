"""Tokenizers that the user brings: of `tokenizers`, of transformers, or anything with encode and decode."""

import inspect
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, SupportsIndex

import numpy as np
import tokenizers

from radix_jax.text.chat import ChatTemplate
from radix_jax.text.errors import TextError
from radix_jax.text.tokenizer import TokenIds, Tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class ForeignTokenizer:
    """A user's object with `encode` and `decode` behind the methods of Tokenizer that the engine's facade calls.

    Its `bos_token_id`, `eos_token_id` and `chat_template` are used where it has them.
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        self.bos_token_id: int | None = getattr(own, "bos_token_id", None)
        self.eos_token_ids = _eos_ids(own)
        template = getattr(own, "chat_template", None)
        self.chat_template: str | None = template if isinstance(template, str) else None
        special_tokens = _special_tokens(own)
        self._bos_text = special_tokens.get("bos_token")
        self._chat = ChatTemplate(self.chat_template, special_tokens) if self.chat_template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> TokenIds:
        """Token ids of `text`, int32 [T]; `add_special_tokens` is passed on if the object takes it.

        As with Tokenizer, a text that already starts with BOS gets no second one.

        Raises:
            TypeError: `text` is not a str, or the object's `encode` gives no list of ids.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is a {type(text).__name__}, not a str")
        ids = _call(self._own.encode, text, "add_special_tokens", add_special_tokens)
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(f"encode of {type(self._own).__name__} gave {type(ids).__name__}, not a list of token ids")
        return np.asarray(self._without_surplus_bos(array.tolist(), text, add_special_tokens), np.int32)

    def _without_surplus_bos(self, ids: list[int], text: str, add_special_tokens: bool) -> list[int]:
        """`ids` less the BOS that the object put before a text that has its own, or that was to get none."""
        if not self._bos_text or self.bos_token_id is None:
            return ids
        num_printed = 0
        while text.startswith(self._bos_text, num_printed * len(self._bos_text)):
            num_printed += 1
        if add_special_tokens and num_printed == 0:
            return ids
        has_surplus = ids[: num_printed + 1] == [self.bos_token_id] * (num_printed + 1)
        return ids[1:] if has_surplus else ids

    def encode_chat(self, messages: object, add_generation_prompt: bool = True) -> TokenIds:
        """Token ids of a conversation by the object's chat template, int32 [T].

        Raises:
            TextError: there is no template, it refuses the messages, or they are malformed.
        """
        if self._chat is None:
            raise TextError("this tokenizer has no chat template; write the prompt yourself and complete it as text")
        return self.encode(self._chat.render(messages, add_generation_prompt), add_special_tokens=False)

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        """Text of token ids; `skip_special_tokens` is passed on if the object takes it."""
        plain_ids = [index(token_id) for token_id in ids]
        return _call(self._own.decode, plain_ids, "skip_special_tokens", skip_special_tokens)


AnyTokenizer = Tokenizer | ForeignTokenizer


def as_tokenizer(own: Any) -> AnyTokenizer:
    """What a user gave as `tokenizer=`, in the form that the facade works with.

    Raises:
        TypeError: it has no `encode` and `decode`.
    """
    if isinstance(own, Tokenizer | ForeignTokenizer):
        return own
    if isinstance(own, tokenizers.Tokenizer):
        return Tokenizer(tokenizers.Tokenizer.from_str(own.to_str()))
    core = getattr(own, "backend_tokenizer", None)
    if isinstance(core, tokenizers.Tokenizer):
        return _of_transformers(own, core)
    if callable(getattr(own, "encode", None)) and callable(getattr(own, "decode", None)):
        return ForeignTokenizer(own)
    raise TypeError(
        f"tokenizer={type(own).__name__} has no encode and decode; give a radix_jax.text.Tokenizer, a "
        "tokenizers.Tokenizer or a transformers tokenizer"
    )


def _of_transformers(own: Any, core: tokenizers.Tokenizer) -> Tokenizer:
    """A fast tokenizer of transformers through its own core, a copy of it."""
    template = getattr(own, "chat_template", None)
    return Tokenizer(
        tokenizers.Tokenizer.from_str(core.to_str()),
        bos_token_id=getattr(own, "bos_token_id", None),
        eos_token_ids=_eos_ids(own),
        chat_template=template if isinstance(template, str) else None,
        special_tokens=_special_tokens(own),
    )


def _eos_ids(own: Any) -> frozenset[int]:
    value = getattr(own, "eos_token_id", None)
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list | tuple | set | frozenset) else frozenset([value])


def _special_tokens(own: Any) -> dict[str, str]:
    tokens = {name: getattr(own, name, None) for name in _SPECIAL_NAMES}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def _call(function: Callable[..., Any], argument: Any, option: str, value: bool) -> Any:
    """`function(argument)`, with the keyword `option` if it takes one of that name."""
    try:
        takes = option in inspect.signature(function).parameters
    except ValueError:
        takes = False
    return function(argument, **{option: value}) if takes else function(argument)
