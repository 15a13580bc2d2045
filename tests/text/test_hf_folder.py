"""Tokenizers from a Hugging Face folder: what each file contributes, and what is wrong with it."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from small_files import byte_level_core, write_json
from tokenizers import processors

from radix_jax.text import TextError, Tokenizer, load_tokenizer

BOS, EOS = 256, 257


def folder_of(tmp_path: Path, core: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
    """A folder with tokenizer.json, and NAME.json for each keyword."""
    core = core or byte_level_core(specials=("<s>", "</s>"))
    core.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        write_json(tmp_path / f"{name}.json", content)
    return tmp_path


def with_bos() -> tokenizers.Tokenizer:
    """A core whose post-processor adds BOS."""
    core = byte_level_core(specials=("<s>", "</s>"))
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return core


def test_special_tokens_by_name_or_object(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "chat_template": "x"}
    tokenizer = load_tokenizer(folder_of(tmp_path, tokenizer_config=config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (BOS, EOS, {EOS})
    assert tokenizer.special_ids == {BOS, EOS}
    assert tokenizer.vocab_size == 258
    assert tokenizer.chat_template == "x"


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    special = {"bos_token": "</s>", "eos_token": "</s>"}
    folder = folder_of(tmp_path, tokenizer_config={"bos_token": "<s>"}, special_tokens_map=special)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (None, None, frozenset())
    assert tokenizer.encode("ab").tolist() == [97, 98]


@pytest.mark.parametrize(
    ("adds", "config", "expected"),
    [
        (False, {}, [97]),
        (True, {}, [BOS, 97]),
        (False, {"add_bos_token": True}, [BOS, 97]),
        (True, {"add_bos_token": True}, [BOS, 97]),
        (True, {"add_bos_token": False}, [97]),
        (True, {"add_eos_token": True}, [BOS, 97, EOS]),
        (True, {"add_bos_token": None}, [BOS, 97]),
    ],
)
def test_what_is_added_to_plain_text(tmp_path: Path, adds: bool, config: dict[str, Any], expected: list[int]) -> None:
    core = with_bos() if adds else None
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    tokenizer = load_tokenizer(folder_of(tmp_path, core, tokenizer_config=config))
    assert tokenizer.encode("a").tolist() == expected
    assert tokenizer.encode("a", add_special_tokens=False).tolist() == [97]
    assert tokenizer.encode("").tolist() == [token_id for token_id in expected if token_id != 97]


def test_text_is_never_clipped_or_padded(tmp_path: Path) -> None:
    core = byte_level_core()
    core.enable_truncation(4)
    core.enable_padding(length=32)
    tokenizer = load_tokenizer(folder_of(tmp_path, core))
    assert len(tokenizer.encode("a" * 10)) == 10


def test_a_template_in_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tokenizer_config={"chat_template": "config"}, chat_template={"chat_template": "json"})
    assert load_tokenizer(folder).chat_template == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert load_tokenizer(folder).chat_template == "jinja"


def test_the_default_one_of_several_templates(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load_tokenizer(folder_of(tmp_path, tokenizer_config={"chat_template": several})).chat_template == "d"
    folder_of(tmp_path, tokenizer_config={"chat_template": several[:1]})
    with pytest.raises(TextError, match="chat templates tool_use, and none named 'default'"):
        load_tokenizer(tmp_path)


def test_no_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TextError, match=r"has no tokenizer.json \(tokenizer files there: tokenizer.model\)"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = folder_of(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(TextError, match=name):
        load_tokenizer(folder)


def test_what_is_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path))
    with pytest.raises(TextError, match="half of a surrogate pair at character 1"):
        tokenizer.encode("a\ud83e")


def test_a_vocabulary_that_is_not_spelled_in_bytes() -> None:
    """WordPiece decodes by rules of its own; the library's decoder is asked."""
    core = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"[UNK]": 0, "un": 1, "##do": 2, "it": 3}, unk_token="[UNK]")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.decoder = tokenizers.decoders.WordPiece()
    tokenizer = Tokenizer(core)
    assert not tokenizer.has_bytes
    assert tokenizer.decode(tokenizer.encode("undo it")) == "undo it"


@pytest.mark.parametrize("scheme", ["always", "never", "first"])
def test_metaspace(scheme: str) -> None:
    vocab = {"<unk>": 0, "▁a": 1, "a": 2, "▁": 3}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = Tokenizer(core)
    assert tokenizer.has_bytes
    for text in ("a a", "aa", "a"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == core.decode(ids.tolist()) == text
