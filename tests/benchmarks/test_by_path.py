"""Benchmarks that use each other run by their path, from any folder, as well as by `python -m`."""

import subprocess
import sys
from pathlib import Path

import pytest

MAINS = [
    path
    for path in sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
    if '__name__ == "__main__"' in path.read_text() and "from benchmarks" in path.read_text()
]


def test_there_are_some() -> None:
    assert {"gpu_check.py", "offline.py", "radix_tree.py"} <= {path.name for path in MAINS}


@pytest.mark.parametrize("script", MAINS, ids=lambda path: path.name)
def test_it_finds_the_others(script: Path, tmp_path: Path) -> None:
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='imported')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
