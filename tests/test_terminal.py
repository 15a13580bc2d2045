"""What the command line shows: streamed text, the tree in the terminal's width, a chat that Ctrl-C does not end."""

import contextlib
import io
import re
import signal
import sys
from collections.abc import Iterator

import pytest
from tiny import assert_idle, dense_greedy, greedy
from tiny_llm import byte_tokenizer, tiny_llm

from radix_jax import LLM
from radix_jax.terminal import Chat, draw_tree, stream_text


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
    llm = tiny_llm()
    out = out or io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr("builtins.input", typist)
        patch.setattr(sys, "stdout", out)
        Chat(llm, greedy(max_tokens), interactive=interactive).run()
    return llm, out.getvalue()


def answers(*turns: str, max_tokens: int = 8) -> list[str]:
    """What the model says in a conversation, from the model alone."""
    tokenizer, messages, said = byte_tokenizer(), [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        said.append(tokenizer.decode(dense_greedy(tokenizer.encode_chat(messages), max_tokens)))
        messages.append({"role": "assistant", "content": said[-1]})
    return said


def test_streamed_pieces_are_the_text() -> None:
    llm = tiny_llm()
    ids = llm.tokenizer.encode("the sea")
    pieces, states = zip(*stream_text(llm, ids, greedy(20)), strict=True)
    assert "".join(pieces) == llm.tokenizer.decode(dense_greedy(ids, 20))
    assert [state.finished for state in states] == [False] * 19 + [True]


def test_closing_a_stream_aborts() -> None:
    llm = tiny_llm()
    with contextlib.closing(stream_text(llm, llm.tokenizer.encode("the sea"), greedy(20))) as states:
        next(states)
        assert llm.engine.has_unfinished()
    assert_idle(llm.engine)


@pytest.mark.parametrize(("columns", "width"), [("20", 80), ("100", 100), ("300", 120)])
def test_a_tree_is_as_wide_as_the_terminal_within_reason(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    llm = tiny_llm()
    llm.generate("one\n" * 25, greedy(1))
    lines = draw_tree(llm.cache.tree.snapshot(), llm.tokenizer).splitlines()
    assert max(map(len, lines[1:])) == width
    assert r"'one\none\none" in lines[2]


def test_a_chat_through_a_pipe_prints_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    typist = Typist("hello", "", "  ", "more")
    _, written = talk(monkeypatch, typist, interactive=False)
    assert written == "".join(f"{said}\n" for said in answers("hello", "more"))
    assert typist.prompts == [""] * 5


def test_a_chat_at_a_terminal_tells_what_was_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, written = talk(monkeypatch, Typist("hello", "more"), interactive=True)
    assert "/reset forgets the conversation" in written
    for said in answers("hello", "more"):
        assert f"{said}\n" in written
    assert "[7 prompt tokens, 0 of them cached; 8 generated, length]" in written
    # A page of 4 holds <|user|>hel; the second turn goes through text, which may give the answer other ids.
    second = re.findall(r"\[(\d+) prompt tokens, (\d+) of them cached; 8 generated, length\]", written)[1]
    assert int(second[0]) > int(second[1]) >= 4
    assert_idle(llm.engine)


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    typist = Typist("hello", "/tree", "/reset", "hello", "/what", "/exit", "never read")
    _, written = talk(monkeypatch, typist, interactive=True)
    assert written.count(f"{answers('hello')[0]}\n") == 2, "after /reset the same question is the first one again"
    assert "radix tree · page size 4" in written
    assert "the conversation is forgotten" in written
    assert "no command /what: /reset" in written
    assert len(typist.prompts) == 6


def test_ctrl_c_ends_an_answer_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    # The first flush is of the word of welcome, the next ones are of the answer's tokens.
    llm, written = talk(monkeypatch, Typist("hello", "/reset", "hello"), interactive=True, out=InterruptedOut(at=4))
    assert "[7 prompt tokens, 0 of them cached; 3 generated, interrupted]" in written
    # The step was not cut through, so what it had cached is still there.
    assert "[7 prompt tokens, 4 of them cached; 8 generated, length]" in written
    assert f"{answers('hello')[0]}\n" in written
    assert signal.getsignal(signal.SIGINT) is before
    assert_idle(llm.engine)


def test_a_second_ctrl_c_in_one_answer_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    run = llm.engine.runner.run

    def slow_step(plan: object) -> object:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return run(plan)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", slow_step)
        with pytest.raises(KeyboardInterrupt):
            talk(monkeypatch, Typist("hello"), interactive=True)
    assert_idle(llm.engine)


def test_ctrl_c_through_a_pipe_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk(monkeypatch, Typist("hello"), interactive=False, out=InterruptedOut(at=2))
    assert_idle(tiny_llm().engine)


def test_ctrl_c_while_typing_throws_the_line_away(monkeypatch: pytest.MonkeyPatch) -> None:
    _, written = talk(monkeypatch, Typist(KeyboardInterrupt(), "hello"), interactive=True)
    assert f"{answers('hello')[0]}\n" in written


def test_ctrl_c_instead_of_a_line_ends_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk(monkeypatch, Typist(KeyboardInterrupt(), "hello"), interactive=False)


def test_a_conversation_that_is_too_long_can_be_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    typist = Typist("hello", "x" * 300, "/reset", "hello")
    _, written = talk(monkeypatch, typist, interactive=True)
    assert "exceeds max_model_len=128" in written
    assert "; /reset starts anew" in written
    assert written.count(f"{answers('hello')[0]}\n") == 2


def test_a_refused_message_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, written = talk(monkeypatch, Typist("hello", "x" * 300, "more"), interactive=True)
    assert f"{answers('hello', 'more')[1]}\n" in written


def test_an_error_ends_a_chat_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="302 tokens exceeds max_model_len=128"):
        talk(monkeypatch, Typist("x" * 300, "hello"), interactive=False)


@pytest.fixture(autouse=True)
def _default_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
