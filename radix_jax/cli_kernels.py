"""radix-jax check-kernel: an attention kernel through the oracle grid."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from radix_jax.attention_backends import AttentionFn, backend_names
from radix_jax.cli_named import named_function

if TYPE_CHECKING:
    from radix_jax.check_kernel import CaseResult, DecodeTiming, KernelReport

_EXIT_NOT_PASSED = 1
_TABLE_WIDTH = 110  # that all columns need; narrower terminals break the lines


def check_kernel(
    kernel: Annotated[str, typer.Argument(help="MODULE:FUNCTION, seen from the current folder, or a backend's name")],
    case: Annotated[str, typer.Option("--case", help="only cases of this name; * stands for anything")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Run an attention kernel through the oracle grid: prefill, decode, windows, odd lengths, poisoned pages and more.

    Where jax sees an accelerator, decode steps are timed too and set against what reading their K and V has to take.
    Options that the function has no keyword for are not held against it. Exits with 1 if a case is wrong.
    """
    from radix_jax.check_kernel import check_kernel as run_checks
    from radix_jax.check_kernel import chosen_cases

    fn = _load(kernel)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("check-kernel", total=len(chosen_cases(case)))

        def tell(_: "CaseResult") -> None:
            progress.advance(task)

        report = run_checks(fn, cases=case, on_case=tell)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print_report(report)
    if not report.passed:
        raise typer.Exit(_EXIT_NOT_PASSED)


def _load(kernel: str) -> AttentionFn | str:
    """The function that the command line names; a backend's name as it is.

    Raises:
        ValueError: neither, or a module that can't be imported.
    """
    if kernel in backend_names():
        return kernel
    module_name, _, fn_name = kernel.partition(":")
    if not module_name or not fn_name:
        raise ValueError(f"{kernel!r} is neither MODULE:FUNCTION nor one of {', '.join(backend_names())}")
    return named_function(kernel)


def _print_report(report: "KernelReport") -> None:
    table = Table()
    table.add_column("case", no_wrap=True)
    table.add_column("max error", justify="right", no_wrap=True)
    table.add_column("tolerance", justify="right", no_wrap=True)
    table.add_column("result")
    for case in report.cases:
        error = "-" if case.max_error is None else f"{case.max_error:.1e}"
        told = f"{case.status}: {case.message}" if case.message else case.status
        table.add_row(case.case, error, f"{case.tolerance:.1e}", told)
    Console(width=max(Console().width, _TABLE_WIDTH), markup=False, highlight=False).print(table)
    if report.copy_bandwidth is not None:
        _print_timings(report.timings, report.copy_bandwidth)
    print(report.summary())


def _print_timings(timings: tuple["DecodeTiming", ...], copy_bandwidth: float) -> None:
    table = Table(title=f"decode, 32 heads on 8 of 128, bfloat16; floors at {copy_bandwidth / 1e12:.2f} TB/s measured")
    for heading in ("rows", "tokens each", "µs a layer", "floor µs", "share of the bandwidth"):
        table.add_column(heading, justify="right")
    for timing in timings:
        share = f"{timing.floor_s / timing.seconds:.0%}" if timing.seconds else "-"
        cells = (f"{timing.num_rows:,}", f"{timing.kv_len:,}", f"{timing.seconds * 1e6:.1f}")
        table.add_row(*cells, f"{timing.floor_s * 1e6:.1f}", share)
    Console(width=max(Console().width, _TABLE_WIDTH)).print(table)
