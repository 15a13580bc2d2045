"""The examples of the README run as they stand."""

import json
import re
import subprocess
import sys

import pytest
from doc_pages import README, python_blocks

FIRST, ENGINE, SAMPLES, SEARCH = (block.code for block in python_blocks(README))


def run(code: str) -> str:
    """What `code` prints, in a process of its own: an engine sets where its process keeps compiled programs."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_first_example_reuses_the_system_prompt() -> None:
    hits = [int(count) for count in re.findall(r"^(\d+) of \d+ prompt tokens came from the cache", run(FIRST), re.M)]
    assert len(hits) == 3
    assert hits[0] == 0
    assert min(hits[1:]) >= 160


def test_first_example_is_as_short_as_promised() -> None:
    assert len([line for line in FIRST.splitlines() if line.strip()]) <= 15


def test_engine_example() -> None:
    lines = run(ENGINE).splitlines()
    assert len(lines) == 8
    assert [line.endswith("True") for line in lines] == [False] * 7 + [True]


def test_samples_and_search_examples() -> None:
    """They go on from the one before."""
    *lines, held = run(ENGINE + SAMPLES + SEARCH).splitlines()[8:]
    assert held == "11 of 12 tokens are held"
    assert [line.endswith("True") for line in lines] == [False] * (len(lines) - 1) + [True]
    token_ids, _ = json.loads(f"[{lines[-1].replace('] T', '], t')}]")
    assert len(token_ids) == 2
    for ids in token_ids:
        assert all(token_id >= 50 for token_id in ids[:-1])
        assert ids[-1] < 50 or len(ids) == 8
