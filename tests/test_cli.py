"""The command line: what it prints, what it exits with, and that bad input is told in one line."""

import dataclasses
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny import dense_greedy
from tiny_llm import Terminal, byte_tokenizer, write_folder

from radix_jax.cli import main
from radix_jax.config import EngineConfig

LIMITS = ["--page-size", "4", "--max-running-requests", "8", "--max-prefill-tokens", "64", "--num-pages", "200"]


@dataclass(frozen=True)
class Done:
    """What a command left."""

    exit_code: int
    out: str
    errors: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `radix-jax ...` in this process."""
    before = signal.getsignal(signal.SIGTERM)

    def run_main(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["radix-jax", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, captured.out, captured.err)

    yield run_main
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model with the byte tokenizer."""
    return str(write_folder(tmp_path_factory.mktemp("tiny")))


def continuation(text: str, num_tokens: int) -> tuple[str, list[int]]:
    """What the tiny model says after a text, and its ids."""
    ids = dense_greedy(list(text.encode()), num_tokens)
    return byte_tokenizer().decode(ids), ids


def error_line(done: Done) -> str:
    """The error, which is one line, the last one."""
    assert done.exit_code == 2
    assert "Traceback" not in done.errors
    line = done.errors.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_one_text(run: Run, model: str) -> None:
    done = run("generate", "the sea", "--model", model, "--max-tokens", "6", *LIMITS)
    assert (done.exit_code, done.out) == (0, continuation("the sea", 6)[0] + "\n")


def test_several_texts_come_under_their_prompts(run: Run, model: str) -> None:
    done = run("generate", "the sea", "a ship", "-m", model, "--max-tokens", "3", *LIMITS)
    expected = [f"[{i}] {text}\n{continuation(text, 3)[0]}\n" for i, text in enumerate(("the sea", "a ship"), 1)]
    assert done.out == "\n".join(expected) + "\n"


def test_json_lines(run: Run, model: str) -> None:
    done = run("generate", "the sea", "the sea", "--json", "-m", model, "--max-tokens", "5", *LIMITS)
    first, second = (json.loads(line) for line in done.out.splitlines())
    text, ids = continuation("the sea", 5)
    assert first == {
        "prompt": "the sea",
        "text": text,
        "token_ids": ids,
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "finish_reason": "length",
    }
    assert second == first | {"cached_tokens": 4}


def test_a_recording_is_a_trace_to_replay(run: Run, model: str, tmp_path: Path) -> None:
    file = str(tmp_path / "requests.jsonl")
    done = run("generate", "the sea", "the sea", "-m", model, "--max-tokens", "5", "--record", file, *LIMITS)
    assert done.exit_code == 0
    # Sped up, as the command line's requests come within microseconds, which may take longer on a machine under load.
    replayed = run("replay", file, "--json", "--no-optimum", "--speed", "1e6", *LIMITS)
    [report] = (json.loads(line) for line in replayed.out.splitlines())
    assert (report["num_requests"], report["num_refused"], report["num_steps"]["decode"]) == (2, 0, 4)
    refused = run("generate", "a", "-m", model, "--record", str(tmp_path / "nowhere" / "x"), *LIMITS)
    assert "nowhere/x' can't be written" in error_line(refused)


def test_a_refused_text_among_good_ones(run: Run, model: str) -> None:
    done = run("generate", "x" * 200, "a", "--json", "-m", model, "--max-tokens", "2", *LIMITS)
    refused, served = (json.loads(line) for line in done.out.splitlines())
    assert refused.keys() == {"prompt", "error"}
    assert "prompt of 200 tokens exceeds max_model_len=128" in refused["error"]
    assert served["token_ids"] == continuation("a", 2)[1]
    assert done.exit_code == 2


def test_standard_input_is_a_prompt(run: Run, model: str) -> None:
    done = run("generate", "-", "--json", "-m", model, "--max-tokens", "2", *LIMITS, stdin="two\nlines\n")
    assert json.loads(done.out)["prompt"] == "two\nlines"


def test_sampling_options_reach_the_engine(run: Run, model: str) -> None:
    arguments = ["generate", "the sea", "-m", model, "--json", "--max-tokens", "8", "--temperature", "5", *LIMITS]
    ids = [json.loads(run(*arguments, "--seed", seed).out)["token_ids"] for seed in ("1", "1", "2")]
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]


def test_text_is_streamed_to_a_terminal(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        run("generate", "the sea", "-m", model, "--max-tokens", "12", *LIMITS)
    text = continuation("the sea", 12)[0]
    assert terminal.getvalue() == text + "\n"
    pieces = [piece for piece in terminal.writes if piece]
    assert len(pieces) > 3, "piece by piece, not in one go"


def test_chat_through_a_pipe(run: Run, model: str) -> None:
    done = run("chat", "-m", model, "--max-tokens", "4", *LIMITS, stdin="hello\n\n/reset\nhello\n")
    answer = byte_tokenizer().decode(dense_greedy([256, *b"hello", 257], 4))
    assert (done.exit_code, done.out) == (0, f"{answer}\n{answer}\n")


def test_tree(run: Run, model: str) -> None:
    limits = ["--max-running-requests", "8", "--max-prefill-tokens", "64", "--num-pages", "200"]
    done = run("tree", "the sea", "the ship", "-m", model, "--max-tokens", "1", *limits)
    assert done.exit_code == 0
    header, root, shared, *leaves = done.out.splitlines()
    assert header.startswith("radix tree · page size 1 · 3 nodes · 10 tokens")
    assert root == "root"
    assert "'the s' · 5 tokens" in shared
    assert sorted(line.split("'")[1] for line in leaves) == ["ea", "hip"]


def test_pull_prints_where_a_model_lies(run: Run, model: str) -> None:
    assert run("pull", model) == Done(0, f"{model}\n", "")


@pytest.mark.parametrize("command", ["generate", "chat", "tree"])
def test_every_setting_of_the_engine_is_an_option(run: Run, command: str) -> None:
    shown = run(command, "--help").out
    for field in dataclasses.fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')} " in shown


def test_help_lists_the_commands(run: Run) -> None:
    shown = run("--help").out
    assert all(f"  {command} " in shown for command in ("generate", "chat", "demo", "pull", "tree"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--page-size", "0"], "page_size=0 is below its least value 1"),
        (["--temperature", "-1"], "temperature=-1.0 is outside"),
        (["--deterministic", "--page-size", "24"], "page_size=24, and deterministic=True cuts attention"),
        (["--schedule-policy", "best"], "schedule_policy='best' is not one of"),
        (["--max-model-len", "1000"], "max_model_len=1000 exceeds the 128 positions"),
        (["--max-prefill-tokens", "2"], "max_prefill_tokens=2 is below page_size=4"),
    ],
)
def test_a_bad_setting_is_one_line(run: Run, model: str, options: list[str], words: str) -> None:
    assert words in error_line(run("generate", "a", "-m", model, *LIMITS, *options))


def test_bad_prompts_are_one_line(run: Run, model: str) -> None:
    assert "empty prompt" in error_line(run("generate", "", "-m", model, *LIMITS))
    assert "exceeds max_model_len" in error_line(run("generate", "x" * 200, "-m", model, *LIMITS))
    assert "exceeds max_model_len" in error_line(run("chat", "-m", model, *LIMITS, stdin="x" * 200))


@pytest.mark.parametrize(
    "command", [["generate", "a", "-m"], ["chat", "-m"], ["tree", "a", "-m"], ["demo", "-m"], ["pull"]]
)
def test_an_unknown_model_is_one_line(run: Run, command: list[str]) -> None:
    line = error_line(run(*command, "no such model"))
    assert "unknown model 'no such model'" in line
    assert "smollm2-135m-instruct" in line


def test_a_damaged_model_is_one_line(run: Run, tmp_path: Path) -> None:
    cut_off = tmp_path / "cut.gguf"
    cut_off.write_bytes(b"GGUF\x03\x00")
    assert str(cut_off) in error_line(run("generate", "a", "-m", str(cut_off)))
    weights = write_folder(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert str(weights) in error_line(run("generate", "a", "-m", str(tmp_path)))


def test_bad_usage_exits_with_2(run: Run) -> None:
    assert run("generate").exit_code == 2
    assert run("fly").exit_code == 2
    assert "--page-size" in run("generate", "a", "--page-size", "four").errors


def test_as_a_module_without_loading_jax_for_its_help() -> None:
    code = "import sys, radix_jax.cli; print(sorted({'jax', 'flax'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
    done = subprocess.run(
        [sys.executable, "-m", "radix_jax", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "generate" in done.stdout


@pytest.mark.parametrize(("same", "exit_code"), [(True, 0), (False, 1)])
def test_the_demo_fails_if_answers_differ(
    run: Run, monkeypatch: pytest.MonkeyPatch, same: bool, exit_code: int
) -> None:
    monkeypatch.setattr("radix_jax.demo.run_demo", lambda model, record: same)
    assert run("demo").exit_code == exit_code
