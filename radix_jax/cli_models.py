"""radix-jax check-model: a model through the invariances of the cache."""

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from radix_jax.cli_named import named_function

if TYPE_CHECKING:
    from radix_jax.check_model import CheckResult, ModelReport

_EXIT_NOT_PASSED = 1
_TABLE_WIDTH = 110  # that all columns need; narrower terminals break the lines


def check_model(
    model: Annotated[
        str,
        typer.Argument(
            help="built-in name, hub id, folder, .gguf file; or MODULE:FUNCTION, seen from the current folder, which "
            "gives (module or config, params)"
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Run a model through what must not change its logits: cache, chunks, batches, page sizes, eviction, retraction.

    A module of your own is first compared with its own call. Log-probabilities are compared, on a few random ids.
    Exits with 1 if a check fails, and says what to look at.
    """
    from radix_jax.check_model import check_model as run_checks
    from radix_jax.check_model import num_checks

    with (
        _opened(model) as (own, params),
        Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress,
    ):
        task = progress.add_task("check-model", total=num_checks(own))

        def tell(_: "CheckResult") -> None:
            progress.advance(task)

        report = run_checks(own, params, name=model, on_check=tell)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print_report(report)
    if not report.passed:
        raise typer.Exit(_EXIT_NOT_PASSED)


@contextlib.contextmanager
def _opened(model: str) -> Iterator[tuple[Any, Any]]:
    """(module or config, params) of what the command line names.

    Raises:
        ValueError: neither can be had.
    """
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", model):
        given = named_function(model)()
        if not isinstance(given, tuple) or len(given) != 2:
            raise ValueError(f"{model} gave a {type(given).__name__}, not (module or config, params or None)")
        yield given
        return
    from radix_jax.llm import LLM

    with LLM(model, num_pages=2) as llm:
        yield llm.engine.params.config, llm.engine.params


def _print_report(report: "ModelReport") -> None:
    table = Table()
    table.add_column("check", no_wrap=True)
    table.add_column("compared")
    table.add_column("largest difference", justify="right", no_wrap=True)
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for check in report.checks:
        largest = "-" if check.largest is None else f"{check.largest:.1e}"
        table.add_row(check.check, check.compared, largest, f"{check.bound:.1e}", check.status)
    Console(width=max(Console().width, _TABLE_WIDTH), markup=False, highlight=False).print(table)
    print(report.as_text())
