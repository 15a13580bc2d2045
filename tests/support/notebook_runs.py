"""Notebooks run in a kernel of this interpreter, and what their cells show.

`python tests/support/notebook_runs.py [NAME ...]` runs those of notebooks/ in full and keeps what they show.

Two tags of a cell are known: `slow`, where it and what follows from it need the real model or minutes, and `varies`,
where it shows what differs from run to run, such as times.
"""

import copy
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_SHOWN = ("image/svg+xml", "text/html", "text/plain")
_CELL_TIMEOUT_S = 600


def read(path: Path) -> NotebookNode:
    """The notebook, checked against the format."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Those that hold code, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def has_tag(cell: NotebookNode, tag: str) -> bool:
    """Whether the cell is tagged so."""
    return tag in cell.metadata.get("tags", ())


def run(cells: Sequence[NotebookNode], *, times_each: int = 1, short: bool = True) -> list[list[list[NotebookNode]]]:
    """Run code cells in a new kernel on the CPU; for each cell the outputs of each of its runs.

    times_each: runs of a cell in a row. short: RADIX_JAX_SHORT=1, by which a notebook takes its short form. What a
    kernel keeps of its own lies in a folder that is removed; models and compiles are kept where they always are.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    repeated = [copy.deepcopy(cell) for cell in cells for _ in range(times_each)]
    for number, cell in enumerate(repeated):
        cell.id, cell.outputs, cell.execution_count = f"cell-{number}", [], None
    notebook = nbformat.v4.new_notebook(cells=repeated)
    with tempfile.TemporaryDirectory() as folder:
        manager = KernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # no folder to look in: this interpreter's own
            connection_file=str(Path(folder) / "kernel.json"),
            transport="ipc",
            ip=str(Path(folder) / "kernel"),
        )
        client = NotebookClient(notebook, km=manager, timeout=_CELL_TIMEOUT_S)
        client.execute(env=_environment(folder, short), cwd=folder, cleanup_kc=True)
    outputs = [cell.outputs for cell in repeated]
    return [outputs[first : first + times_each] for first in range(0, len(outputs), times_each)]


def _environment(folder: str, short: bool) -> dict[str, str]:
    own = dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"), folder)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **own, "MPLCONFIGDIR": folder, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    environment.pop("RADIX_JAX_SHORT", None)
    return environment | {"RADIX_JAX_SHORT": "1"} if short else environment


def shown(outputs: Iterable[NotebookNode]) -> list[tuple[str, str]]:
    """(kind, content) of what a cell shows: what it printed, then pictures as SVG or HTML, else text. What it wrote to
    stderr is no part of it."""
    printed, pictures = "", []
    for output in outputs:
        if output.output_type == "stream":
            printed += output.text if output.name == "stdout" else ""
        elif output.output_type in ("display_data", "execute_result"):
            kind = next((kind for kind in _SHOWN if kind in output.data), None)
            if kind is not None:
                pictures.append((kind, output.data[kind].strip()))
    return [("stdout", printed), *pictures] if printed else pictures


def errors_written(outputs: Iterable[NotebookNode]) -> str:
    """What a cell wrote to stderr."""
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stderr")


def keep_outputs(path: Path) -> None:
    """Run the notebook in full and write what it shows into it, without warnings and progress."""
    notebook = read(path)
    cells = code_cells(notebook)
    for number, (cell, [outputs]) in enumerate(zip(cells, run(cells, short=False), strict=True), 1):
        for output in outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
        cell.outputs = [output for output in outputs if output.get("name") != "stderr"]
        cell.execution_count = number
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        if notebook_path.stem in sys.argv[1:] or len(sys.argv) == 1:
            keep_outputs(notebook_path)
            print(f"{notebook_path}: {notebook_path.stat().st_size:,} bytes")
