"""radix-jax replay: figures, sweeps, pictures, and what it refuses."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from radix_jax.cli import main

TRACE = str(Path(__file__).parent / "data" / "traces" / "mooncake_synthetic.jsonl")
SMALL = (TRACE, "--limit", "12", "--page-size", "512", "--max-prefill-tokens", "4096")
PNG = b"\x89PNG\r\n\x1a\n"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `radix-jax replay ...` in this process: exit code, output, errors."""
    before = signal.getsignal(signal.SIGTERM)

    def run_main(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["radix-jax", "replay", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code or 0
        assert isinstance(code, int)
        return code, captured.out, captured.err

    yield run_main
    signal.signal(signal.SIGTERM, before)


def test_one_run_is_told_a_figure_a_line(run: Run):
    code, out, _ = run(*SMALL, "--num-pages", "200", "--no-partial-pages")
    assert code == 0
    figures = dict(line.split("  ", 1) for line in out.splitlines())
    assert figures["num requests"].strip() == "12"
    assert figures["pool tokens"].strip() == "101,888"
    assert 0 < float(figures["hit rate"]) <= float(figures["optimal hit rate"]) + 1e-9


def test_a_sweep_runs_every_combination_and_draws_it(run: Run, tmp_path: Path):
    sweeps = ("eviction=lru,reuse-rate", "pool=50000,100000", "page-size=256,512")
    arguments = [part for sweep in sweeps for part in ("--sweep", sweep)]
    pictures = [tmp_path / "a.png", tmp_path / "a.html"]
    code, out, _ = run(*SMALL, "--json", *arguments, "--plot", str(pictures[0]), "--plot", str(pictures[1]))
    assert code == 0
    reports = [json.loads(line) for line in out.splitlines()]
    settings = [(one["pool_tokens"], one["page_size"], one["eviction_policy"]) for one in reports]
    assert settings == [
        (pool // page * page, page, policy)
        for pool in (50_000, 100_000)
        for page in (256, 512)
        for policy in ("lru", "reuse-rate")
    ]
    assert all(one["num_refused"] == 0 and one["hit_rate"] <= 1 for one in reports)
    assert pictures[0].read_bytes().startswith(PNG)
    page = pictures[1].read_text()
    assert page.count("<tr>") == 9
    assert "<svg" in page
    assert 'src="' not in page
    assert page.count("reuse-rate") >= 4


def test_a_sweep_prints_a_table(run: Run):
    code, out, _ = run(*SMALL, "--no-optimum", "--sweep", "schedule=fcfs,lpm")
    assert code == 0
    assert "fcfs" in out
    assert "lpm" in out
    assert "page size 512, pool tokens 999,936" in out


def test_costs_and_speed_change_the_clock(run: Run):
    def duration_s(*arguments: str) -> float:
        return json.loads(run(*SMALL, "--json", "--no-optimum", *arguments)[1])["duration_s"]

    assert duration_s("--speed", "1000") < duration_s()
    assert duration_s("--per-prefill-token-s", "1.0") > 10 * duration_s()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--sweep", "colour=red"), "give each of eviction, schedule, page-size and pool at most once"),
        (("--sweep", "eviction=lru", "--sweep", "eviction=lfu"), "at most once"),
        (("--sweep", "eviction=best"), "eviction_policy='best' is not one of"),
        (("--plot", "a.jpg"), "must end in .png or .html"),
        (("--limit", "0"), "limit=0 is below"),
        (("--speed", "0"), "speed=0.0 is not above 0"),
        (("--sweep", "page-size=0"), "page_size=0 is below"),
        (("--speed", "1e-320"), "arrives at inf s"),
        (("--per-step-s", "-1"), "per_step_s=-1.0 is below 0"),
    ],
)
def test_bad_options_are_told_in_one_line(run: Run, arguments: tuple[str, ...], reason: str):
    code, _, errors = run(*SMALL, *arguments)
    assert code == 2
    assert reason in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_without_matplotlib_a_plot_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, errors = run(*SMALL, "--plot", str(tmp_path / "a.png"))
    assert code == 2
    assert errors.splitlines()[-1] == "error: plots need matplotlib: pip install 'radix_jax[plots]'"
    assert not (tmp_path / "a.png").exists()
