"""The incremental detokenizer: pieces joined are the whole, and no piece holds half a character."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_files import byte_level_core
from tokenizers import decoders, models

from radix_jax.checkpoints import resolve
from radix_jax.text import AnyTokenizer, ForeignTokenizer, IncrementalDetokenizer, Tokenizer, load_tokenizer

HALVES = (b"\xf0\x9f", b"\xa7\xaa", b"\xe2\x82", b"\xc3", b"ab", b"\xff\xfe", "é🧪".encode())


@cache
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve("smollm2-135m-instruct"))


@cache
def halves() -> Tokenizer:
    """Byte-level; its tokens can be half a character."""
    return Tokenizer(byte_level_core(HALVES, specials=("<s>", "</s>")))


@cache
def sentencepiece(strips: bool) -> Tokenizer:
    """Llama-2-like: words start with ▁, and each byte has a token of its own."""
    words = ["<unk>", "▁", "▁a", "a", "b", "▁▁", "é", "<s>"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if strips else undo)
    core.add_special_tokens(["<s>", "<unk>"])
    return Tokenizer(core)


class BytesTokenizer:
    """A user's own tokenizer: ids are bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def stream(tokenizer: AnyTokenizer, ids: Sequence[int], cuts: Sequence[int] = (), skip: bool = True) -> list[str]:
    """Pieces when `ids` come a token at a time, or in the slices that end at `cuts`."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    ends = sorted({cut for cut in cuts if cut < len(ids)} | {len(ids)}) if cuts else range(1, len(ids) + 1)
    pieces, start = [], 0
    for end in ends:
        pieces.append(detokenizer.push(ids[start:end]))
        start = end
    return [*pieces, detokenizer.finish()]


ids_and_cuts = {
    "smollm2": (smollm2, 49152),
    "halves": (halves, 256 + len(HALVES) + 2),
    "sentencepiece": (lambda: sentencepiece(False), 264),
    "sentencepiece that strips": (lambda: sentencepiece(True), 264),
    "foreign": (lambda: ForeignTokenizer(BytesTokenizer()), 256),
}


@pytest.mark.parametrize("kind", ids_and_cuts)
@settings(max_examples=150)
@given(data=st.data())
def test_pieces_joined_are_the_whole(kind: str, data: st.DataObject) -> None:
    make, num_ids = ids_and_cuts[kind]
    # Half of the ids are high ones, among which are the tokens that are no text by themselves.
    token_id = st.one_of(st.integers(0, num_ids - 1), st.integers(max(0, num_ids - 300), num_ids - 1))
    ids = data.draw(st.lists(token_id, max_size=40))
    cuts = data.draw(st.lists(st.integers(1, 40), max_size=10))
    skip = True if kind == "foreign" else data.draw(st.booleans())
    tokenizer = make()
    assert "".join(stream(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ids_and_cuts)
@settings(max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}")))
def test_text_never_shows_half_a_character(kind: str, text: str) -> None:
    tokenizer = ids_and_cuts[kind][0]()
    if not kind.startswith("sentencepiece"):
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    else:
        ids = [8 + byte for byte in text.encode()]
        text = text.removeprefix(" ") if kind.endswith("strips") else text
    if tokenizer.decode(ids) != text:
        return  # the text spells a special token, which decoding skips
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(max_examples=150)
@given(ids=st.lists(st.integers(0, 49151), max_size=60))
def test_decode_equals_the_library_s(ids: list[int]) -> None:
    """On the real vocabulary, bytes that are no UTF-8 included."""
    tokenizer = smollm2()
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer._core.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = halves()
    [special] = tokenizer.encode("<s>", add_special_tokens=False)
    assert stream(tokenizer, [97, special, 98]) == ["a", "", "b", ""]
    assert stream(tokenizer, [97, special, 98], skip=False) == ["a", "<s>", "b", ""]


def test_a_special_token_inside_a_character_leaves_it_whole() -> None:
    tokenizer = halves()
    [special] = tokenizer.encode("<s>", add_special_tokens=False)
    assert "".join(stream(tokenizer, [256, special, 257])) == "🧪"


def test_the_leading_space_is_stripped_once() -> None:
    tokenizer = sentencepiece(True)
    assert stream(tokenizer, [2, 2]) == ["a", " a", ""]
    assert stream(tokenizer, [1, 1, 3]) == ["", " ", "a", ""]
    assert "".join(stream(tokenizer, [7, 5, 3])) == " a"


def test_ids_may_be_numpy_s() -> None:
    ids = halves().encode("naïve 🧪")
    assert IncrementalDetokenizer(halves()).push(ids) == "naïve 🧪" == halves().decode(ids)
    in_bytes = np.frombuffer("naïve".encode(), np.uint8)
    assert "".join(stream(ForeignTokenizer(BytesTokenizer()), in_bytes)) == "naïve"


def test_nothing_pushed_is_nothing() -> None:
    assert stream(halves(), []) == [""]
    assert IncrementalDetokenizer(halves()).push([]) == ""


def test_a_long_run_of_invalid_bytes_is_given_out_as_it_comes() -> None:
    """No more is held back than can still become a character, so that memory and work a token stay constant."""
    for tokenizer in (halves(), ForeignTokenizer(BytesTokenizer())):
        ids = [0xFF] * 500
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 500
        given = 0
        for pushed, piece in enumerate(pieces[:-1], start=1):
            given += len(piece)
            assert pushed - given <= 3


class CountingTokenizer(BytesTokenizer):
    """Counts the ids that it is asked to decode."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids)


def test_work_a_token_does_not_grow_with_the_text() -> None:
    num_decoded = {}
    for num_ids in (1000, 4000):
        own = CountingTokenizer()
        stream(ForeignTokenizer(own), list(("naïve 🧪 " * num_ids).encode()[:num_ids]))
        num_decoded[num_ids] = own.num_decoded
    assert num_decoded[4000] < 4.2 * num_decoded[1000]


def test_a_negative_id_is_refused() -> None:
    with pytest.raises(ValueError, match="token id -1 is negative"):
        IncrementalDetokenizer(halves()).push([-1])
    with pytest.raises(ValueError, match="token id -1 is negative"):
        halves().decode([-1])


def test_an_id_without_a_token_has_no_text() -> None:
    assert "".join(stream(halves(), [97, 9999, 98])) == "ab" == halves().decode([97, 9999, 98])
