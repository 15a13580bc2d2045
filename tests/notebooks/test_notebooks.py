"""Each notebook runs from top to bottom and shows what is kept in it: what it prints, and every picture."""

from pathlib import Path

import pytest
from notebook_runs import NOTEBOOKS, ROOT, code_cells, errors_written, has_tag, read, run, shown

HINT = "run `python tests/support/notebook_runs.py`, look at the notebook, commit it"


def name_of(path: Path) -> str:
    return path.stem


def has_slow_cells(path: Path) -> bool:
    return any(has_tag(cell, "slow") for cell in code_cells(read(path)))


def check_runs(path: Path, times_each: int, *, with_slow: bool) -> None:
    """Every run of every cell shows what is kept, but for cells that vary; cells that are not slow write no warning."""
    cells = [cell for cell in code_cells(read(path)) if with_slow or not has_tag(cell, "slow")]
    for cell, runs in zip(cells, run(cells, times_each=times_each), strict=True):
        assert len(runs) == times_each
        for outputs in runs:
            if not has_tag(cell, "slow"):
                assert errors_written(outputs) == "", cell.id
            if not has_tag(cell, "varies"):
                assert shown(outputs) == shown(cell.outputs), f"cell {cell.id} shows something else: {HINT}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_each_run_of_a_cell_shows_what_is_kept(path: Path) -> None:
    check_runs(path, 2, with_slow=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times_each", [1, 2])
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if has_slow_cells(path)], ids=name_of)
def test_all_of_it_shows_what_is_kept(path: Path, times_each: int) -> None:
    check_runs(path, times_each, with_slow=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_outputs_are_kept(path: Path) -> None:
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), HINT
    kinds = {kind for cell in cells for output in cell.outputs for kind in output.get("data", ())}
    assert kinds & {"image/svg+xml", "image/png"}, "nothing is drawn"
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)


def test_the_demo_keeps_its_pictures() -> None:
    cells = {cell.id: cell for cell in code_cells(read(ROOT / "notebooks" / "colab_demo.ipynb"))}
    for name in ("insert-a", "insert-b", "insert-c", "match", "requests", "model-tree"):
        assert not has_tag(cells[name], "varies")
        assert [content[:4] for kind, content in shown(cells[name].outputs) if kind == "image/svg+xml"] == ["<svg"]


def test_a_change_of_a_picture_is_seen() -> None:
    [cell] = [cell for cell in code_cells(read(ROOT / "notebooks" / "colab_demo.ipynb")) if cell.id == "insert-a"]
    before = shown(cell.outputs)
    cell.outputs[0].data["image/svg+xml"] = cell.outputs[0].data["image/svg+xml"].replace("101", "102")
    assert shown(cell.outputs) != before
