"""The user's own tokenizer: ours, one of `tokenizers`, of transformers, or anything with encode and decode."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from small_files import byte_level_core
from tokenizers import processors

from radix_jax.text import ForeignTokenizer, TextError, Tokenizer, as_tokenizer


class PlainTokenizer:
    """encode and decode and nothing else: ids are code points."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class FullTokenizer(PlainTokenizer):
    """Takes the options that transformers' slow tokenizers take; BOS is 1, EOS 2."""

    bos_token, bos_token_id, eos_token, eos_token_id = "\x01", 1, "\x02", [2, 3]
    chat_template = "{{ bos_token }}{{ messages[0].content }}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + super().encode(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return super().decode([i for i in ids if not (skip_special_tokens and i <= 3)])


class FastTokenizer:
    """What a fast tokenizer of transformers shows: its core, its ids and its template."""

    bos_token, bos_token_id, eos_token, eos_token_id = "<s>", 256, "</s>", 257
    chat_template = "{{ bos_token }}{{ messages[0].content }}"

    def __init__(self) -> None:
        self.backend_tokenizer = byte_level_core(specials=("<s>", "</s>"))
        template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
        self.backend_tokenizer.post_processor = template


def test_our_own_is_taken_as_it_is() -> None:
    tokenizer = Tokenizer(byte_level_core())
    assert as_tokenizer(tokenizer) is tokenizer
    foreign = ForeignTokenizer(PlainTokenizer())
    assert as_tokenizer(foreign) is foreign


def test_a_core_is_copied() -> None:
    core = byte_level_core()
    core.enable_truncation(3)
    tokenizer = as_tokenizer(core)
    assert len(tokenizer.encode("abcdef")) == 6
    assert len(core.encode("abcdef").ids) == 3


def test_a_fast_tokenizer_of_transformers() -> None:
    tokenizer = as_tokenizer(FastTokenizer())
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.has_bytes
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, {257})
    assert tokenizer.encode("a").tolist() == [256, 97]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).tolist() == [256, 97]


def test_encode_and_decode_are_enough() -> None:
    tokenizer = as_tokenizer(PlainTokenizer())
    ids = tokenizer.encode("né")
    assert ids.dtype == np.int32
    assert ids.tolist() == [110, 233]
    assert tokenizer.decode(ids) == "né"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, frozenset())
    with pytest.raises(TextError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


def test_options_are_passed_on_where_they_are_taken() -> None:
    tokenizer = as_tokenizer(FullTokenizer())
    assert tokenizer.encode("a").tolist() == [1, 97]
    assert tokenizer.encode("a", add_special_tokens=False).tolist() == [97]
    assert tokenizer.decode([1, 97]) == "a"
    assert tokenizer.decode([1, 97], skip_special_tokens=False) == "\x01a"
    assert tokenizer.eos_token_ids == {2, 3}
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).tolist() == [1, 97]


def test_an_encode_that_always_adds_bos() -> None:
    class Always(FullTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text, add_special_tokens=True)

    tokenizer = as_tokenizer(Always())
    assert tokenizer.encode("a").tolist() == [1, 97]
    assert tokenizer.encode("a", add_special_tokens=False).tolist() == [97]
    assert tokenizer.encode("\x01a").tolist() == [1, 97]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).tolist() == [1, 97]


@pytest.mark.parametrize("given", [object(), 3, "smollm2", {}])
def test_what_is_no_tokenizer(given: Any) -> None:
    with pytest.raises(TypeError, match=r"has no encode and decode; give a radix_jax\.text\.Tokenizer"):
        as_tokenizer(given)


@pytest.mark.parametrize("ids", ["text", [1.5], [[1, 2]], {"input_ids": [1]}])
def test_an_encode_that_gives_no_ids(ids: Any) -> None:
    class Wrong(PlainTokenizer):
        def encode(self, text: str) -> Any:
            return ids

    with pytest.raises(TypeError, match="encode of Wrong gave"):
        as_tokenizer(Wrong()).encode("x")
