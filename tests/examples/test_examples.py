"""Every example runs as it stands and says what it should."""

import re
import runpy
from pathlib import Path

import pytest

from radix_jax.models import registry

FOLDER = Path(__file__).parents[2] / "examples"
SAYS = {
    "beam_search": r"(width 1: .*\n)(width 4: .*\n){4}46 tokens computed, \d+ found in the cache\n",
    "best_of_n": r"(best of [18]: mean .*\n){2}28 prompt tokens computed for 9 samples of 20 tokens\n",
    "generation_loop": "",
    "own_model_linen": "",
    "own_model_nnx": "",
    "tree_of_thought": r"mean .* of \[.*\]\n39 prompt tokens computed, 113 found in the cache\nradix tree .*",
}


@pytest.mark.parametrize("name", SAYS)
def test_it_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", list(registry._FAMILIES))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.fullmatch(SAYS[name], said, flags=re.DOTALL if name == "tree_of_thought" else 0), said


@pytest.mark.parametrize("name", SAYS)
def test_it_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 80
