"""Stop strings: found wherever tokens cut them, never given out in part, and nothing else is lost."""

import codecs
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_files import byte_level_core

from radix_jax.request import FinishAt
from radix_jax.text import ForeignTokenizer, IncrementalDetokenizer, StopText, Tokenizer

SPECIAL = "<|end|>"
PIECES = ["ab", "ba", "aab", "abab", "b🧪", "é", "éa", "<|"]
HALVES = [b"\xf0\x9f", b"\xa7\xaa", b"\xc3", b"\xa9", b"a\xf0", b"\xffb"]
LETTERS = ["a", "b", "é", "🧪", "\N{REPLACEMENT CHARACTER}", "<", "|"]


@cache
def tokenizer() -> Tokenizer:
    """Few letters in many tokens: parts of characters, characters, and several of them."""
    pieces = [piece.encode() for piece in PIECES] + HALVES
    return Tokenizer(byte_level_core(pieces, specials=[SPECIAL]))


@cache
def token_ids() -> dict[bytes, int]:
    return {tokenizer().token_bytes(token_id): token_id for token_id in range(tokenizer().vocab_size)}


def ids_of(*tokens: str | bytes) -> list[int]:
    return [token_ids()[token.encode() if isinstance(token, str) else token] for token in tokens]


class Letters:
    """A user's own tokenizer: an id is a letter."""

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(LETTERS[token_id] for token_id in ids)


def stream(text: StopText, ids: Sequence[int]) -> tuple[list[str], int | None, str | None]:
    """(what is certain after each token and at the end, tokens that it took, the stop string)."""
    pieces = []
    for num_ids, token_id in enumerate(ids, 1):
        finish = text.push([token_id])
        pieces.append(text.take())
        if finish is not None:
            assert finish == (1, text.stop)
            return [*pieces, text.finish()], num_ids, text.stop
    return [*pieces, text.finish()], None, text.stop


def stable_texts(ids: Sequence[int]) -> list[str]:
    """The text of the first 0, 1, 2, ... tokens, without the start of an unfinished character at its end."""
    utf8, texts = codecs.getincrementaldecoder("utf-8")(errors="replace"), [""]
    for token_id in ids:
        data = b"" if token_id in tokenizer().special_ids else tokenizer().token_bytes(token_id)
        texts.append(texts[-1] + utf8.decode(data))
    return texts


def first_stop(text: str, stops: Sequence[str], behind: int) -> tuple[int, int, int] | None:
    """(end, place in the list, start) of the stop string that ends first behind so many characters."""
    found = [
        (start + len(stop), place, start)
        for place, stop in enumerate(stops)
        for start in range(len(text) - len(stop) + 1)
        if text.startswith(stop, start) and start + len(stop) > behind
    ]
    return min(found, default=None)


def num_uncertain(text: str, stops: Sequence[str]) -> int:
    """Characters at the end that may become a stop string."""
    return max(
        (n for stop in stops for n in range(1, min(len(text), len(stop) - 1) + 1) if text[-n:] == stop[:n]), default=0
    )


common_ids = st.lists(
    st.one_of(st.sampled_from([97, 98]), st.integers(256, 256 + len(PIECES) + len(HALVES)), st.integers(0, 255)),
    max_size=24,
)
random_stops = st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=5), max_size=4)


@settings(max_examples=400)
@given(ids=common_ids, stops=random_stops, cuts=st.data(), min_tokens=st.integers(0, 6), include_stop=st.booleans())
def test_as_searching_the_whole_text(
    ids: list[int], stops: list[str], cuts: st.DataObject, min_tokens: int, include_stop: bool
) -> None:
    texts, whole = stable_texts(ids), tokenizer().decode(ids)
    # What is in the text, so that it is found, and what nearly is.
    for _ in range(cuts.draw(st.integers(0, 2)) if whole else 0):
        start = cuts.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + cuts.draw(st.integers(1, 6))])
    behind = len(texts[min(min_tokens, len(ids))])
    end = first_stop(whole, stops, behind) if len(ids) > min_tokens else None
    expected = whole if end is None else whole[: end[0]] if include_stop else whole[: end[2]]
    pieces, num_ids, stop = stream(StopText(tokenizer(), stops, include_stop=include_stop, min_tokens=min_tokens), ids)
    assert "".join(pieces) == expected
    assert stop == (None if end is None else stops[end[1]])
    if end is not None:
        # The token that completed it; None: half a character that only the end of the ids made text.
        completes = next((n for n, text in enumerate(texts) if n > min_tokens and len(text) >= end[0]), None)
        assert num_ids == completes
    given_out = ""
    for num_tokens, piece in enumerate(pieces[:-1], 1):
        given_out += piece
        if num_ids is None or num_tokens < num_ids:
            text = texts[num_tokens]
            assert given_out == text[: len(text) - num_uncertain(text, stops)], "no more and no less is held back"


@settings(max_examples=150)
@given(letters=st.text(st.sampled_from(LETTERS), max_size=30), stops=random_stops, cuts=st.lists(st.integers(1, 5)))
def test_any_number_of_tokens_at_once_and_a_tokenizer_without_bytes(
    letters: str, stops: list[str], cuts: list[int]
) -> None:
    own = Letters()
    ids, end = own.encode(letters), first_stop(letters, stops, 0)
    text, finish, start = StopText(ForeignTokenizer(own), stops), None, 0
    while start < len(ids) and finish is None:
        stop = start + (cuts.pop() if cuts else 3)
        finish = text.push(ids[start:stop])
        start = start + finish.num_ids if finish is not None else stop
    assert text.finish() == (letters if end is None else letters[: end[2]])
    assert text.stop == (None if end is None else stops[end[1]])
    # Replacement characters may be halves of one to come, and wait for it.
    if end is not None and finish is not None and LETTERS[4] not in letters:
        assert start == end[0]


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "num_ids", "stop"),
    [
        (["a", "b", "ab"], ["ba"], "a", 3, "ba"),  # across a border
        (["aab", "a"], ["ab"], "a", 1, "ab"),  # inside a token
        (["abab"], ["bab", "ba"], "a", 1, "ba"),  # several in one token: the earliest end
        (["ab"], ["b", "ab"], "a", 1, "b"),  # at the same end: the first listed
        (["ab"], ["ab", "b"], "", 1, "ab"),
        (["a", b"\xf0\x9f", b"\xa7\xaa", "a"], ["🧪"], "a", 3, "🧪"),  # a character split over tokens
        (["b🧪", "é"], ["🧪é"], "b", 2, "🧪é"),
        (["a", SPECIAL, "b"], ["|end|"], "ab", None, None),  # special tokens have no text
        (["a", SPECIAL, "b"], ["ab"], "", 3, "ab"),  # and separate none
        (["a", b"\xf0\x9f"], ["\N{REPLACEMENT CHARACTER}"], "a", None, "\N{REPLACEMENT CHARACTER}"),
        ([], ["a"], "", None, None),
    ],
)
def test_by_hand(tokens: list[str | bytes], stops: list[str], text: str, num_ids: int | None, stop: str | None) -> None:
    pieces, num_taken, found = stream(StopText(tokenizer(), stops), ids_of(*tokens))
    assert ("".join(pieces), num_taken, found) == (text, num_ids, stop)


def test_names_of_special_tokens_where_they_are_shown() -> None:
    text = StopText(tokenizer(), ["|end|"], skip_special_tokens=False)
    assert text.push(ids_of("a", SPECIAL, "b")) == FinishAt(2, "|end|")
    assert text.finish() == "a<"


def test_what_may_become_a_stop_string_is_held_back_until_it_does_not() -> None:
    text = StopText(tokenizer(), ["abba", "aé"])
    taken = []
    for token in ("a", "b", "b", "ba", "b", "aab"):
        assert text.push(ids_of(token)) is None
        taken.append(text.take())
    assert taken == ["", "", "", "abbb", "", "aba"]
    assert text.finish() == "ab"
    assert text.finish() == "", "it is given out once"


def test_the_stop_string_is_kept_where_that_is_asked_for() -> None:
    text = StopText(tokenizer(), ["ba"], include_stop=True)
    assert text.push(ids_of("a", "b", "abab")) == FinishAt(3, "ba")
    assert text.take() == "aba"
    assert text.finish() == ""


def test_what_is_complete_before_min_tokens_is_no_stop() -> None:
    """What only begins there is one."""
    text = StopText(tokenizer(), ["bb"], min_tokens=3)
    assert text.push(ids_of("b", "b", "b")) is None
    assert text.take() == "bb"
    assert text.push(ids_of("b")) == FinishAt(1, "bb")
    assert text.finish() == ""


def test_without_stop_strings_it_is_the_detokenizer() -> None:
    ids = ids_of("a", b"\xf0\x9f", b"\xa7\xaa", "é", b"\xc3")
    text, detokenizer = StopText(tokenizer()), IncrementalDetokenizer(tokenizer())
    for token_id in ids:
        assert text.push([token_id]) is None
        assert text.take() == detokenizer.push([token_id])
    assert text.finish() == detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"
