"""Double BOS after a chat template: there is one BOS, from the template or from the tokenizer, never from both."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from small_files import byte_alphabet, byte_level_core, write_json
from tokenizers import processors

from radix_jax.text import AnyTokenizer, as_tokenizer, load_tokenizer
from radix_jax.text.gguf_vocab import tokenizer_of_metadata

BOS, EOS = 256, 257
WITH_BOS = "{{ bos_token }}{{ messages[0].content }}"
WITH_BOS_IN_WORDS = "<s>{{ messages[0].content }}"
WITHOUT_BOS = "{{ messages[0].content }}"
TALK = [{"role": "user", "content": "hi"}]


def adding_core() -> tokenizers.Tokenizer:
    """A core whose post-processor adds BOS to every text."""
    core = byte_level_core(specials=("<s>", "</s>"))
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return core


def hf_by_processor(folder: Path, template: str) -> AnyTokenizer:
    adding_core().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "chat_template": template})
    return load_tokenizer(folder)


def hf_by_flag(folder: Path, template: str) -> AnyTokenizer:
    byte_level_core(specials=("<s>", "</s>")).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "add_bos_token": True, "chat_template": template}
    write_json(folder / "tokenizer_config.json", config)
    return load_tokenizer(folder)


def gguf(folder: Path, template: str) -> AnyTokenizer:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*byte_alphabet(), "<s>", "</s>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": template,
    }
    return tokenizer_of_metadata(folder / "m.gguf", metadata)


def transformers(folder: Path, template: str) -> AnyTokenizer:
    class Fast:
        backend_tokenizer = adding_core()
        bos_token, bos_token_id, chat_template = "<s>", BOS, template

    return as_tokenizer(Fast())


def foreign(folder: Path, template: str) -> AnyTokenizer:
    class Own:
        bos_token, bos_token_id, chat_template = "<s>", BOS, template

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return adding_core().encode(text, add_special_tokens=add_special_tokens).ids

        def decode(self, ids: list[int]) -> str:
            return adding_core().decode(ids)

    return as_tokenizer(Own())


@pytest.fixture(params=[hf_by_processor, hf_by_flag, gguf, transformers, foreign], ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], AnyTokenizer]:
    """A tokenizer that adds BOS, of each kind, with the given template."""
    return lambda template: request.param(tmp_path, template)


@pytest.mark.parametrize("template", [WITH_BOS, WITH_BOS_IN_WORDS])
def test_a_template_that_prints_bos(make: Callable[[str], AnyTokenizer], template: str) -> None:
    assert make(template).encode_chat(TALK).tolist() == [BOS, *b"hi"]


def test_a_template_that_does_not(make: Callable[[str], AnyTokenizer]) -> None:
    assert make(WITHOUT_BOS).encode_chat(TALK).tolist() == [*b"hi"]


def test_raw_text_gets_the_tokenizer_s_default(make: Callable[[str], AnyTokenizer]) -> None:
    tokenizer = make(WITH_BOS)
    assert tokenizer.encode("hi").tolist() == [BOS, *b"hi"]
    assert tokenizer.encode("hi", add_special_tokens=False).tolist() == [*b"hi"]


def test_a_template_rendered_by_hand_and_completed_as_text(make: Callable[[str], AnyTokenizer]) -> None:
    assert make(WITH_BOS).encode("<s>hi").tolist() == [BOS, *b"hi"]


def test_bos_inside_the_text_stays(make: Callable[[str], AnyTokenizer]) -> None:
    tokenizer = make(WITH_BOS)
    assert tokenizer.encode("a<s>").tolist() == [BOS, 97, BOS]
    assert tokenizer.encode("<s><s>a").tolist() == [BOS, BOS, 97]
