"""Emoji streamed as replacement characters: no chunk may hold half a character, whatever the tokens cut."""

import itertools
import json
from collections.abc import Iterator

import pytest
from small_files import byte_level_core

from radix_jax.text import IncrementalDetokenizer, Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"


def pieces_of(tokens: list[bytes]) -> list[str]:
    """What the detokenizer gives out, token after token, and at the end."""
    tokenizer = Tokenizer(byte_level_core([token for token in dict.fromkeys(tokens) if len(token) > 1]))
    id_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push([id_of[token]]) for token in tokens), detokenizer.finish()]


def all_splits(data: bytes) -> Iterator[list[bytes]]:
    """Every way to cut `data` into tokens."""
    for cuts in itertools.product([False, True], repeat=len(data) - 1):
        places = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(data)]
        yield [data[start:end] for start, end in itertools.pairwise(places)]


def test_test_tube_in_three_tokens() -> None:
    pieces = pieces_of([b"\xf0\x9f", b"\xa7", b"\xaa", b"x"])
    assert pieces == ["", "", "🧪", "x", ""]
    assert json.loads(json.dumps(pieces).encode()) == pieces


@pytest.mark.parametrize("text", ["é", "€", "🧪", "aé€", "x🧪", "🧪x", "éß", "\U0010ffff", "\x00é"])
def test_every_split_of_two_three_and_four_byte_characters(text: str) -> None:
    for tokens in all_splits(text.encode()):
        pieces = pieces_of(tokens)
        assert "".join(pieces) == text
        assert BROKEN not in "".join(pieces)
        so_far = b""
        for token, end in zip(tokens, itertools.accumulate(pieces), strict=False):
            so_far += token
            assert end == so_far.decode("utf-8", errors="ignore"), "a whole character is given out at once"


@pytest.mark.parametrize(
    "data",
    [
        b"\xf0\x9f\xa7",  # cut off
        b"\xf0\x9f\xa7x",  # cut off, then text
        b"\x80\x80",  # continuations without a start
        b"\xc0\xaf",  # overlong
        b"\xed\xa0\x80",  # a surrogate
        b"\xf5\x80\x80\x80",  # above U+10FFFF
        b"\xe2\x82\xf0\x9f\xa7\xaa",  # a cut character, then a whole one
        b"a\xffb",
    ],
)
def test_invalid_bytes_read_as_in_the_whole(data: bytes) -> None:
    for tokens in all_splits(data):
        assert "".join(pieces_of(tokens)) == data.decode("utf-8", errors="replace")
