"""Tokenizers from GGUF metadata: the real SmolLM2 against its golden ids, and small vocabularies of each kind."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_files import LLAMA_METADATA, byte_alphabet, write_gguf

from radix_jax.checkpoints import resolve
from radix_jax.text import TextError, Tokenizer, load_tokenizer
from radix_jax.text.gguf_vocab import tokenizer_of_metadata
from radix_jax.text.pre_tokenizer import PRE_TOKENIZERS

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "smollm2-135m-instruct.json").read_text())
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve("smollm2-135m-instruct"))


@pytest.mark.parametrize("prompt", GOLDEN["prompts"], ids=lambda prompt: str(prompt["prompt_token_ids"][:3]))
def test_golden_prompts(smollm2: Tokenizer, prompt: dict[str, Any]) -> None:
    ids = smollm2.encode(prompt["text"]) if "text" in prompt else smollm2.encode_chat(prompt["messages"])
    assert ids.dtype == np.int32
    assert ids.tolist() == prompt["prompt_token_ids"]
    assert smollm2.decode(prompt["greedy_token_ids"], skip_special_tokens=False) == prompt["greedy_text"]


def test_golden_file_has_both_kinds() -> None:
    assert {"text" in prompt for prompt in GOLDEN["prompts"]} == {True, False}
    assert len(GOLDEN["prompts"]) == 10


def test_smollm2_s_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.eos_token_ids) == (1, 2, {2})
    assert smollm2.special_ids == set(range(17))
    assert smollm2.id_to_token(2) == "<|im_end|>"
    assert smollm2.encode("a<|im_end|>b").tolist()[1:2] == [2]
    assert smollm2.encode("").tolist() == []
    assert smollm2.chat_template is not None
    assert "SmolLM" in smollm2.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "text", ["naïve café", " \n\t x  y ", "12345 6", "🧪🚀", "def f(x):\n    return x\n", "\x00", "'tis"]
)
def test_text_comes_back(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


def gpt2_metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary: 256 bytes, "ab", "abc", control <s> and </s>, user-defined <tool>."""
    tokens = [*byte_alphabet(), "ab", "abc", "<s>", "</s>", "<tool>"]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [NORMAL] * 258 + [CONTROL, CONTROL, USER_DEFINED],
        "merges": ["a b", "ab c"],
        "bos_token_id": 258,
        "eos_token_id": 259,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def gpt2(**changes: Any) -> Tokenizer:
    return tokenizer_of_metadata(Path("m.gguf"), gpt2_metadata(**changes))


def test_merges_and_special_tokens() -> None:
    tokenizer = gpt2()
    assert tokenizer.encode("abcab<tool>a</s>").tolist() == [257, 256, 260, 97, 259]
    assert tokenizer.decode([257, 260, 258, 97]) == "abc<tool>a"
    assert tokenizer.special_ids == {258, 259}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [97]),
        ({"add_bos_token": True}, [258, 97]),
        ({"add_bos_token": True, "add_eos_token": True}, [258, 97, 259]),
        ({"pre": "llama-bpe"}, [258, 97]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [97]),
        ({"pre": "llama-bpe", "bos_token_id": None}, [97]),
    ],
)
def test_what_is_added_to_plain_text(changes: dict[str, Any], expected: list[int]) -> None:
    assert gpt2(**changes).encode("a").tolist() == expected
    assert gpt2(**changes).encode("a", add_special_tokens=False).tolist() == [97]


def test_all_ids_that_end_a_turn() -> None:
    assert gpt2(eot_token_id=260).eos_token_ids == {259, 260}


def test_a_whole_word_is_taken_without_merges_where_the_model_does() -> None:
    assert gpt2(merges=["a b"], pre="llama-bpe", add_bos_token=False).encode("abc").tolist() == [257]
    assert gpt2(merges=["a b"], pre="gpt-2").encode("abc").tolist() == [256, 99]


WORDS = "Don't stop: 12345 naïve  words\r\n\n  x=1 "


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "Don|'t| stop|:| 12345| naïve| | words|\r\n\n | x|=|1| "),
        ("smollm", "Don|'t| stop|:| |1|2|3|4|5| naïve| | words|\r\n\n | x|=|1| "),
        ("starcoder", "Don|'t| stop|:| |1|2|3|4|5| naïve| | words|\r\n\n | x|=|1| "),
        ("refact", "Don|'t| stop|:| |1|2|3|4|5| naïve| | words|\r\n\n | x|=|1| "),
        ("command-r", "Don|'t| stop|:| |1|2|3|4|5| naïve| | words|\r\n\n | x|=|1| "),
        ("llama-bpe", "Don|'t| stop|:| |123|45| naïve| | words|\r\n\n| | x|=|1| "),
        ("qwen2", "Don|'t| stop|:| |1|2|3|4|5| naïve| | words|\r\n\n| | x|=|1| "),
        ("tekken", "Don|'t| stop|:| |1|2|3|4|5| naïve| | words|\r\n\n| | x|=|1| "),
        ("default", "Don|'|t| stop|:| |123|45| naïve| | words|\r\n\n | x|=|1| "),
    ],
)
def test_how_each_pre_tokenizer_cuts(pre: str, expected: str) -> None:
    core = gpt2(pre=pre)._core
    assert core.pre_tokenizer is not None
    pieces = core.pre_tokenizer.pre_tokenize_str(WORDS)
    assert "|".join(WORDS[start:end] for _, (start, end) in pieces) == expected


def test_tekken_cuts_where_case_changes() -> None:
    core = gpt2(pre="tekken")._core
    assert core.pre_tokenizer is not None
    text = "camelCaseHTTPServer x"
    pieces = [text[start:end] for _, (start, end) in core.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == ["camel", "Case", "HTTPServer", " x"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_gives_text_back(pre: str) -> None:
    text = "ÅngströM's 1²3½ ٣٤ 漢字かな — “x”…\u200d🧪🏽\n\t \u3000z"
    tokenizer = gpt2(pre=pre, add_bos_token=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_nfc_where_the_model_was_trained_on_it() -> None:
    decomposed = "e\N{COMBINING ACUTE ACCENT}"
    assert gpt2(pre="qwen2").encode(decomposed).tolist() == gpt2(pre="qwen2").encode("é").tolist()
    assert gpt2(pre="gpt-2").encode(decomposed).tolist() != gpt2(pre="gpt-2").encode("é").tolist()


def test_no_pre_tokenizer_named_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert gpt2(pre=None).encode("abc").tolist() == [257]
    assert "m.gguf names no pre-tokenizer" in caplog.text


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """SentencePiece: scores say that "ab" goes before "bc", and "▁a" last."""
    words = {"▁": -10.0, "a": -11.0, "b": -12.0, "c": -13.0, "ab": -1.0, "bc": -2.0, "abc": -4.0, "▁a": -5.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<tool>"]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [*words.values(), 0.0],
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), USER_DEFINED],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode(text).tolist()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", ["<s>", "▁", "abc"]),  # ab first (-1), then abc; never ▁a, whose score is lower
        ("a bc", ["<s>", "▁a", "▁", "bc"]),
        (" a", ["<s>", "▁", "▁a"]),
        ("é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
        ("a<tool>a", ["<s>", "▁a", "<tool>", "▁a"]),
        ("", ["<s>"]),
    ],
)
def test_sentencepiece_merges_by_score(text: str, expected: list[str]) -> None:
    assert pieces(tokenizer_of_metadata(Path("m.gguf"), spm_metadata()), text) == expected


def test_sentencepiece_text_comes_back() -> None:
    for prefix in (True, False):
        tokenizer = tokenizer_of_metadata(Path("m.gguf"), spm_metadata(add_space_prefix=prefix))
        for text in ("abc", " abc", "a  b\n", "é🧪"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_without_the_space_before() -> None:
    tokenizer = tokenizer_of_metadata(Path("m.gguf"), spm_metadata(add_space_prefix=False, add_bos_token=False))
    assert pieces(tokenizer, "a a") == ["a", "▁a"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "holds no tokenizer"),
        (gpt2_metadata(tokens=None), "holds no tokenizer"),
        (gpt2_metadata(model="bert"), "tokenizer of kind 'bert'; built are 'gpt2'"),
        (gpt2_metadata(pre="of-tomorrow"), "asks for pre-tokenizer 'of-tomorrow', which is not built .*gpt-2"),
        (gpt2_metadata(merges=None), "without merges"),
        (gpt2_metadata(merges=["ab"]), r"malformed merge 'ab' \+ ''"),
        (gpt2_metadata(merges=["a z-not-here"]), r"malformed merge 'a' \+ 'z-not-here'"),
        (gpt2_metadata(tokens=["a", "b", "a"], token_type=[1, 1, 1]), "3 tokens has only 2 different ones"),
        (gpt2_metadata(token_type=[1, 1]), "261 tokens and 2 token types"),
        (gpt2_metadata(bos_token_id=999), "bos_token_id 999 is outside"),
        (spm_metadata(scores=None), "without scores"),
        (spm_metadata(scores=[1.0]), "268 tokens and 1 scores"),
        (spm_metadata(remove_extra_whitespaces=True), "remove_extra_whitespaces, which is not built"),
    ],
)
def test_what_cannot_be_used_is_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(TextError, match=f"m.gguf.*{message}"):
        tokenizer_of_metadata(Path("m.gguf"), metadata)


def test_through_a_file_and_a_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA | gpt2_metadata(), {})
    for place in (path, tmp_path, str(path)):
        assert load_tokenizer(place).encode("abc").tolist() == [257]
    with pytest.raises(TextError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
