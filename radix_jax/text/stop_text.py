"""The text of a completion up to its first stop string, as its tokens come."""

from collections.abc import Sequence

from radix_jax.request import FinishAt
from radix_jax.text.detokenizer import IncrementalDetokenizer
from radix_jax.text.foreign import AnyTokenizer


class StopText:
    """Decodes the tokens of one completion, looks for stop strings, and gives the text out once it is certain.

    stop: of the strings that are complete in the text, the one that ends first counts, of those that end at the same
    character the one listed first. include_stop: the text keeps it; else it ends in front of it.
    min_tokens: what is complete before so many tokens is no stop.

    What may be the beginning of a stop string is held back, and so is half a character, until more tokens or `finish`
    tell. A stop string is found wherever tokens cut it; the prompt is not looked at.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._strings = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._certain: list[str] = []  # not taken yet
        self._held = ""
        self._stop: str | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self._stop

    def push(self, ids: Sequence[int]) -> FinishAt | None:
        """More tokens. What comes behind the one that completes a stop string is not looked at; push no more then."""
        for place, token_id in enumerate(ids, 1):
            self._num_tokens += 1
            self._add(self._detokenizer.push([token_id]))
            if self._stop is not None:
                return FinishAt(place, self._stop)
        return None

    def take(self) -> str:
        """The text that is certain and was not taken yet."""
        text = "".join(self._certain)
        self._certain.clear()
        return text

    def finish(self) -> str:
        """No more tokens come: as `take`, with all that was held back."""
        if self._stop is None:
            self._add(self._detokenizer.finish())
        self._certain.append(self._held)
        self._held = ""
        return self.take()

    def _add(self, new: str) -> None:
        held_len, text = len(self._held), self._held + new
        found = self._first_stop(text, held_len) if self._num_tokens > self._min_tokens else None
        if found is None:
            end = len(text) - self._num_uncertain(text)
            self._held = text[end:]
        else:
            end, self._stop = found
            self._held = ""
        self._certain.append(text[:end])

    def _first_stop(self, text: str, old_len: int) -> tuple[int, str] | None:
        """Where the text is cut, and by which stop string; of those that end behind the first `old_len` characters."""
        starts = [text.find(string, max(old_len + 1 - len(string), 0)) for string in self._strings]
        ends = [
            (start + len(string), place)
            for place, (string, start) in enumerate(zip(self._strings, starts, strict=True))
            if start >= 0
        ]
        if not ends:
            return None
        end, place = min(ends)
        return end if self._include_stop else starts[place], self._strings[place]

    def _num_uncertain(self, text: str) -> int:
        """Characters at the end of the text that a stop string may begin with."""
        return max((_overlap(text, string) for string in self._strings), default=0)


def _overlap(text: str, string: str) -> int:
    """Characters of the longest end of `text` that `string` begins with and is longer than."""
    most = min(len(string) - 1, len(text))
    return next((length for length in range(most, 0, -1) if text.endswith(string[:length])), 0)
