"""Every script of examples/ runs without a download, and prints what it is there to show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# The others run in the tests' own process, see test_examples.py.
ELSEWHERE = {"beam_search.py", "best_of_n.py", "own_model_linen.py", "own_model_nnx.py", "tree_of_thought.py"}
SCRIPTS = sorted(
    path
    for path in EXAMPLES.glob("*.py")
    if '__name__ == "__main__"' in path.read_text("utf-8") and path.name not in ELSEWHERE
)
PRINTS = {
    "generate.py": r"'One, two, three,' -> .* \(12 tokens, length\)\n'Water is' -> .*\n'Water is' -> ",
    "logprobs_and_stop.py": r"rank 1: .*\n(.*\n)*the string .*, stop, .*\nthe id .*, stop, .*\na check: .*'even id'",
    "shared_prefix.py": r"first round\n +0 of 102 .*\n(.*\n)*second round\n +101 of 102 .*\n(.*\n)*radix tree · ",
    "streaming.py": r"unfinished requests: 0\naborted: abort\npages still locked: 0\n$",
    "trace_replay.py": r"^360 requests, .*\n.*\n( +\d+,\d00  .*\n){9}$",
    "update_weights.py": r"^round 0: weights 0 to 0, reward 0\.[45]\d\n(.*\n)*round 4: weights 4 to 4, reward (0\.9|1)",
}
MAX_LINES = 60


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script(script: Path) -> None:
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTS.get(script.name, r"\S"), done.stdout), done.stdout


def test_scripts_are_short() -> None:
    assert set(PRINTS) <= {script.name for script in SCRIPTS}
    for script in SCRIPTS:
        assert len(script.read_text("utf-8").splitlines()) <= MAX_LINES, script.name
