"""What the command line shows: text as it is generated, the tree in the terminal's width, and a chat."""

import contextlib
import shutil
import signal
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

import numpy as np

from radix_jax.llm import LLM
from radix_jax.request import RequestOutput, SamplingParams
from radix_jax.text import AnyTokenizer, IncrementalDetokenizer
from radix_jax.viz import TreeSnapshot, render_text

_MIN_WIDTH, _USUAL_WIDTH, _MAX_WIDTH = 80, 100, 120
_MAX_NODES = 60
_COMMANDS = "/reset forgets the conversation, /tree draws the cache, /exit or Ctrl-D ends"


def terminal_width() -> int:
    """Columns to write in: the terminal's, within 80 to 120; 100 where there is none."""
    width = shutil.get_terminal_size((_USUAL_WIDTH, 24)).columns
    return min(max(width, _MIN_WIDTH), _MAX_WIDTH)


def draw_tree(snapshot: TreeSnapshot, tokenizer: AnyTokenizer) -> str:
    """The tree as lines of text, tokens decoded, as wide as `terminal_width`."""
    return render_text(snapshot, tokenizer.decode, max_nodes=_MAX_NODES, width=terminal_width())


def stream_text(
    llm: LLM, token_ids: np.ndarray, sampling: SamplingParams
) -> Generator[tuple[str, RequestOutput], None, None]:
    """(new text, state of the request), token by token; closing it aborts the request.

    Raises:
        ValueError: as `Engine.add_request`, on the first step.
    """
    detokenizer = IncrementalDetokenizer(llm.tokenizer)
    num_given = 0
    with contextlib.closing(llm.engine.stream(token_ids, sampling)) as states:
        for output in states:
            new_ids = output.outputs[0].token_ids[num_given:]
            num_given += len(new_ids)
            text = detokenizer.push(new_ids)
            yield text + (detokenizer.finish() if output.finished else ""), output


class Chat:
    """A conversation: at a terminal with a prompt, commands and an answer that Ctrl-C ends; or a line at a time.

    interactive: a person types. If not, answers are all that is printed, and an error ends the chat.
    """

    def __init__(self, llm: LLM, sampling: SamplingParams, *, interactive: bool) -> None:
        self._llm = llm
        self._sampling = sampling
        self._interactive = interactive
        self._messages: list[dict[str, str]] = []

    def run(self) -> None:
        """Answer until the input ends or /exit.

        Raises:
            ValueError: nobody is there to correct it, and a conversation cannot be answered (too long, for one).
        """
        self._note(f"{_COMMANDS}; Ctrl-C ends an answer")
        while (line := self._read_line()) is not None:
            words = line.strip()
            if words == "/exit":
                return
            if words.startswith("/"):
                self._obey(words)
            elif words:
                self._answer(words)

    def _read_line(self) -> str | None:
        """The next line; None at the end of the input, "" where Ctrl-C threw it away."""
        try:
            return input("> " if self._interactive else "")
        except EOFError:
            self._note("")
            return None
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._note(f"\n{_COMMANDS}")
            return ""

    def _obey(self, command: str) -> None:
        if command == "/reset":
            self._messages.clear()
            self._note("the conversation is forgotten; what is cached stays")
        elif command == "/tree":
            print(draw_tree(self._llm.cache.snapshot(), self._llm.tokenizer))
        else:
            self._note(f"no command {command}: {_COMMANDS}")

    def _answer(self, words: str) -> None:
        messages = [*self._messages, {"role": "user", "content": words}]
        try:
            answer = self._stream_answer(messages)
        except ValueError as error:
            if not self._interactive:
                raise
            self._note(f"error: {error}; /reset starts anew")
            return
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _stream_answer(self, messages: list[dict[str, str]]) -> str:
        """Print the answer as it comes; what was printed, should Ctrl-C end it."""
        pieces: list[str] = []
        token_ids = self._llm.tokenizer.encode_chat(messages)
        # An interrupt inside a step would cost the cache: at the terminal it is seen between two steps.
        watch = _interrupts() if self._interactive else contextlib.nullcontext([])
        with watch as interrupts, contextlib.closing(stream_text(self._llm, token_ids, self._sampling)) as states:
            for piece, output in states:
                pieces.append(piece)
                print(piece, end="", flush=True)
                if output.finished or interrupts:
                    num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
                    print(flush=True)
                    self._note(
                        f"[{num_prompt:,} prompt tokens, {output.cached_tokens:,} of them cached; "
                        f"{num_output:,} generated, {'interrupted' if interrupts else output.outputs[0].finish_reason}]"
                    )
                    break
        return "".join(pieces)

    def _note(self, words: str) -> None:
        """A word to the person at the terminal."""
        if self._interactive:
            print(words, flush=True)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that gets an entry at the first Ctrl-C; the second one raises KeyboardInterrupt as usual."""
    seen: list[int] = []

    def note(signal_number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signal_number)

    before: Any = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
