"""The demo on a tiny model, and, slow, on the real one."""

import dataclasses
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import TINY
from tiny_llm import write_folder

from radix_jax import Engine
from radix_jax.demo import SCRIPT, Script, run_demo

SHORT = Script(system_prompt="You are a ship.", questions=("Where?", "Why?", "When?"), turns=("Oh", "No"), max_tokens=4)
LONG_CONTEXT = dataclasses.replace(TINY, max_position_embeddings=1024)


def numbers_after(name: str, shown: str) -> list[int]:
    """The row of the comparison that begins with `name`: round 1, round 2, chat, all."""
    [row] = re.findall(rf"^ *{re.escape(name)} +([\d, ]+)$", shown, re.MULTILINE)
    return [int(number.replace(",", "")) for number in row.split()]


def answer_lengths(shown: str) -> list[tuple[int, int]]:
    """(prompt tokens, cached tokens) of every answer shown."""
    return [(int(prompt), int(cached)) for prompt, cached in re.findall(r"^ +(\d+) +(\d+)  \S", shown, re.MULTILINE)]


def check_numbers(shown: str, num_questions: int, num_turns: int) -> None:
    """What is shown of single answers and what is shown of the whole agree."""
    lengths = answer_lengths(shown)
    assert len(lengths) == 2 * num_questions + num_turns
    parts = [lengths[:num_questions], lengths[num_questions : 2 * num_questions], lengths[2 * num_questions :], lengths]
    prompt_tokens = [sum(prompt for prompt, _ in part) for part in parts]
    cached_tokens = [sum(cached for _, cached in part) for part in parts]
    assert numbers_after("prompt tokens", shown) == prompt_tokens
    assert numbers_after("from the cache", shown) == cached_tokens
    computed = [prompt - cached for prompt, cached in zip(prompt_tokens, cached_tokens, strict=True)]
    assert numbers_after("computed, cache on", shown) == computed
    assert numbers_after("computed, cache off", shown) == prompt_tokens
    assert f"{computed[-1]:,} of {prompt_tokens[-1]:,} prompt tokens computed, {cached_tokens[-1]:,} saved" in shown
    assert f"all {len(lengths)} are the same" in shown
    # In the second round all of a prompt is there, and its last token is computed all the same.
    assert all(cached == prompt - 1 for prompt, cached in parts[1])


def test_on_a_tiny_model(tmp_path: Path) -> None:
    out = io.StringIO()
    folder, record = str(write_folder(tmp_path, LONG_CONTEXT)), tmp_path / "requests.jsonl"
    assert run_demo(folder, SHORT, Console(file=out, highlight=False, width=100), record=str(record))
    assert len(record.read_text().splitlines()) == 2 * len(SHORT.questions) + len(SHORT.turns)
    shown = out.getvalue()
    assert "\x1b" not in shown, "no colours but on a terminal"
    assert f"{tmp_path.name} · 0.1M parameters · 2 layers" in shown
    assert str(tmp_path.parent) in shown
    assert "as float32 in" in shown
    assert shown.count("5 programs compiled in") == 2
    for question in (*SHORT.questions, *SHORT.questions, *SHORT.turns):
        assert question in shown
    check_numbers(shown, 3, 2)
    # The first one computes all; then 17 tokens up to the question are there, and "Wh" of "Why?", "Whe" of "When?".
    assert [cached for _, cached in answer_lengths(shown)[:3]] == [0, 19, 20]
    header, tree = shown.split("radix tree · ")[1].split("\n", 1)
    assert re.match(r"page size 1 · \d+ nodes · \d+ tokens \([1-9]\d* locked", header)
    assert "'systemYou" not in tree
    assert "You are a ship." in tree
    assert " 1 lock · " in tree


def test_a_script_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path, LONG_CONTEXT))
    with pytest.raises(ValueError, match="exceeds max_model_len=768"):
        run_demo(folder, dataclasses.replace(SHORT, system_prompt="x" * 800), Console(file=io.StringIO()))


def test_answers_that_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_ends(*arguments: Any, eos_token_ids: object) -> Engine:
        """The second engine ends every answer at its first token."""
        return Engine(*arguments, eos_token_ids=range(TINY.vocab_size))

    monkeypatch.setattr("radix_jax.demo.Engine", other_ends)
    out = io.StringIO()
    folder = str(write_folder(tmp_path, LONG_CONTEXT))
    script = dataclasses.replace(SHORT, questions=("Where?",), turns=("Oh",))
    assert not run_demo(folder, script, Console(file=out, highlight=False, width=100))
    shown = out.getvalue()
    assert "3 of 3 differ with the cache off:\n  round 1: Where?\n  round 2: Where?\n  chat: Oh\n" in shown
    assert "are the same" not in shown


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_on_the_real_model() -> None:
    """As `make demo` runs it, through a pipe."""
    done = subprocess.run(
        [sys.executable, "-m", "radix_jax", "demo"],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "134.5M parameters · 30 layers" in done.stdout
    check_numbers(done.stdout, len(SCRIPT.questions), len(SCRIPT.turns))
    assert min(prompt for prompt, _ in answer_lengths(done.stdout)) > 400
    assert "You are Ada" in done.stdout.split("radix tree · ")[1]
