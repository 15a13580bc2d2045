"""What the command line shows: streamed text, the tree in the terminal's width, a chat that Ctrl-C does not end."""

import contextlib
import dataclasses
import functools
import io
import signal
import sys

import pytest
from tiny import TINY, assert_idle, dense_greedy, greedy, module_of, random_weights
from tiny_llm import letter_core, new_llm

from radix_jax import LLM
from radix_jax.models.llama import Llama
from radix_jax.terminal import Chat, draw_tree, stream_text
from radix_jax.text import Tokenizer

pytestmark = pytest.mark.usefixtures("usual_interrupts")

# Every token of this model is a letter, so that what it says can be told apart.
LETTERS = dataclasses.replace(TINY, vocab_size=64)
TEMPLATE = "{% for message in messages %}{{ message.role[0] | upper }}:{{ message.content }}.{% endfor %}A:"


@functools.cache
def letter_tokenizer() -> Tokenizer:
    return Tokenizer(letter_core(), chat_template=TEMPLATE)


@functools.cache
def letter_module() -> Llama:
    return module_of(LETTERS, random_weights(LETTERS))


@functools.cache
def _kept_llm() -> LLM:
    return new_llm(letter_module(), letter_tokenizer())


def letter_llm() -> LLM:
    """An LLM with an empty cache."""
    llm = _kept_llm()
    assert not llm.engine.has_unfinished()
    llm.flush_cache()
    return llm


class Typist:
    """Stands in for the keyboard: gives line after line, raises what is an exception, then ends the input."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = iter(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


class InterruptedOut(io.StringIO):
    """Where the chat writes; Ctrl-C comes at the `at`-th flush."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at
        self._num_flushes = 0

    def flush(self) -> None:
        self._num_flushes += 1
        if self._num_flushes == self._at:
            signal.raise_signal(signal.SIGINT)


def talk(
    monkeypatch: pytest.MonkeyPatch,
    typist: Typist,
    *,
    interactive: bool,
    max_tokens: int = 8,
    out: io.StringIO | None = None,
) -> tuple[LLM, str]:
    """Run a chat to its end; the LLM and all that was written."""
    llm = letter_llm()
    out = out or io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr("builtins.input", typist)
        patch.setattr(sys, "stdout", out)
        Chat(llm, greedy(max_tokens), interactive=interactive).run()
    return llm, out.getvalue()


def answers(*turns: str, max_tokens: int = 8) -> list[str]:
    """What the model says in a conversation, from the model alone."""
    tokenizer, messages, said = letter_tokenizer(), [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        said.append(tokenizer.decode(dense_greedy(tokenizer.encode_chat(messages), max_tokens, letter_module())))
        messages.append({"role": "assistant", "content": said[-1]})
    return said


def test_streamed_pieces_are_the_text() -> None:
    llm = letter_llm()
    ids = llm.tokenizer.encode("SEA")
    pieces, states = zip(*stream_text(llm, ids, greedy(20)), strict=True)
    assert "".join(pieces) == llm.tokenizer.decode(dense_greedy(ids, 20, letter_module()))
    assert [state.finished for state in states] == [False] * 19 + [True]


def test_closing_a_stream_aborts() -> None:
    llm = letter_llm()
    with contextlib.closing(stream_text(llm, llm.tokenizer.encode("SEA"), greedy(20))) as states:
        next(states)
        assert llm.engine.has_unfinished()
    assert_idle(llm.engine)


@pytest.mark.parametrize(("columns", "width"), [("20", 80), ("100", 100), ("300", 120)])
def test_a_tree_is_as_wide_as_the_terminal_within_reason(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    llm = letter_llm()
    llm.generate("A\\" * 50, greedy(1))
    lines = draw_tree(llm.cache.tree.snapshot(), llm.tokenizer).splitlines()
    assert max(map(len, lines[1:])) == width
    assert r"'A\\A\\A" in lines[2]


def test_a_chat_through_a_pipe_prints_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    typist = Typist("HELLO", "", "  ", "MORE")
    _, written = talk(monkeypatch, typist, interactive=False)
    assert written == "".join(f"{said}\n" for said in answers("HELLO", "MORE"))
    assert typist.prompts == [""] * 5


def test_a_chat_at_a_terminal_tells_what_was_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, written = talk(monkeypatch, Typist("HELLO", "MORE"), interactive=True)
    assert "/reset forgets the conversation" in written
    for said in answers("HELLO", "MORE"):
        assert f"{said}\n" in written
    assert "[10 prompt tokens, 0 of them cached; 8 generated, length]" in written
    # U:HELLO.A: and the answer are 18 tokens, the last one without KV; .U:MORE.A: are 10 more.
    assert "[28 prompt tokens, 17 of them cached; 8 generated, length]" in written
    assert_idle(llm.engine)


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    typist = Typist("HELLO", "/tree", "/reset", "HELLO", "/what", "/exit", "never read")
    _, written = talk(monkeypatch, typist, interactive=True)
    assert written.count(f"{answers('HELLO')[0]}\n") == 2, "after /reset the same question is the first one again"
    assert "radix tree · page size 4" in written
    assert "the conversation is forgotten" in written
    assert "no command /what: /reset" in written
    assert len(typist.prompts) == 6


def test_ctrl_c_ends_an_answer_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    # The first flush is of the word of welcome, the next ones are of the answer's tokens.
    llm, written = talk(monkeypatch, Typist("HELLO", "/reset", "HELLO"), interactive=True, out=InterruptedOut(at=4))
    assert "[10 prompt tokens, 0 of them cached; 3 generated, interrupted]" in written
    # The step was not cut through, so what it had cached is still there.
    assert "[10 prompt tokens, 8 of them cached; 8 generated, length]" in written
    assert f"{answers('HELLO')[0]}\n" in written
    assert signal.getsignal(signal.SIGINT) is before
    assert_idle(llm.engine)


def test_a_second_ctrl_c_in_one_answer_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = letter_llm()
    dispatch = llm.engine.runner.dispatch

    def slow_step(plan: object) -> object:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return dispatch(plan)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "dispatch", slow_step)
        with pytest.raises(KeyboardInterrupt):
            talk(monkeypatch, Typist("HELLO"), interactive=True)
    assert_idle(llm.engine)


def test_ctrl_c_through_a_pipe_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk(monkeypatch, Typist("HELLO"), interactive=False, out=InterruptedOut(at=2))
    assert_idle(letter_llm().engine)


def test_ctrl_c_while_typing_throws_the_line_away(monkeypatch: pytest.MonkeyPatch) -> None:
    _, written = talk(monkeypatch, Typist(KeyboardInterrupt(), "HELLO"), interactive=True)
    assert f"{answers('HELLO')[0]}\n" in written


def test_ctrl_c_instead_of_a_line_ends_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk(monkeypatch, Typist(KeyboardInterrupt(), "HELLO"), interactive=False)


def test_a_conversation_that_is_too_long_can_be_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    typist = Typist("HELLO", "X" * 300, "/reset", "HELLO")
    _, written = talk(monkeypatch, typist, interactive=True)
    assert "exceeds max_model_len=128" in written
    assert "; /reset starts anew" in written
    assert written.count(f"{answers('HELLO')[0]}\n") == 2


def test_a_refused_message_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, written = talk(monkeypatch, Typist("HELLO", "X" * 300, "MORE"), interactive=True)
    assert f"{answers('HELLO', 'MORE')[1]}\n" in written


def test_an_error_ends_a_chat_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="305 tokens exceeds max_model_len=128"):
        talk(monkeypatch, Typist("X" * 300, "HELLO"), interactive=False)
