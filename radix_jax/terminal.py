"""What the command line shows: text as it is generated, the tree in the terminal's width, and a chat."""

import contextlib
import shutil
import signal
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any, TextIO

import numpy as np

from radix_jax.llm import LLM
from radix_jax.request import RequestOutput, SamplingParams
from radix_jax.text import AnyTokenizer, IncrementalDetokenizer
from radix_jax.viz import TreeSnapshot, render_text

_MIN_WIDTH, _MAX_WIDTH = 80, 120
_COMMANDS = "/reset forgets the conversation, /tree draws the cache, /exit or Ctrl-D ends"


def draw_tree(snapshot: TreeSnapshot, tokenizer: AnyTokenizer, max_nodes: int = 60) -> str:
    """The tree as lines of text, tokens decoded, as wide as the terminal within 80 to 120 columns."""
    width = shutil.get_terminal_size().columns
    return render_text(snapshot, tokenizer.decode, max_nodes=max_nodes, width=min(max(width, _MIN_WIDTH), _MAX_WIDTH))


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

    def __init__(self, llm: LLM, sampling: SamplingParams, out: TextIO, *, interactive: bool) -> None:
        self._llm = llm
        self._sampling = sampling
        self._out = out
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
            self._out.write(draw_tree(self._llm.cache.tree.snapshot(), self._llm.tokenizer) + "\n")
        else:
            self._note(f"no command {command}: {_COMMANDS}")

    def _answer(self, words: str) -> None:
        self._messages.append({"role": "user", "content": words})
        answer = ""
        try:
            answer = self._stream_answer()
        except ValueError as error:
            if not self._interactive:
                raise
            self._note(f"error: {error}; /reset starts anew")
        finally:
            if answer:
                self._messages.append({"role": "assistant", "content": answer})
            else:
                self._messages.pop()

    def _stream_answer(self) -> str:
        """Print the answer as it comes; what was printed, should Ctrl-C end it."""
        pieces: list[str] = []
        token_ids = self._llm.tokenizer.encode_chat(self._messages)
        # An interrupt inside a step would cost the cache: at the terminal it is seen between two steps.
        watch = _interrupts() if self._interactive else contextlib.nullcontext([])
        with watch as interrupts, contextlib.closing(stream_text(self._llm, token_ids, self._sampling)) as states:
            for piece, output in states:
                pieces.append(piece)
                self._out.write(piece)
                self._out.flush()
                if output.finished or interrupts:
                    num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
                    self._out.write("\n")
                    self._note(
                        f"[{num_prompt:,} prompt tokens, {output.cached_tokens:,} of them cached; "
                        f"{num_output:,} generated, {'interrupted' if interrupts else output.outputs[0].finish_reason}]"
                    )
                    break
        return "".join(pieces)

    def _note(self, words: str) -> None:
        """A word to the person at the terminal."""
        if self._interactive:
            self._out.write(f"{words}\n")
            self._out.flush()


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
