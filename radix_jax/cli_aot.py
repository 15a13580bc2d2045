"""radix-jax aot: a model's steps on a GPU that is not there."""

import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from radix_jax.cli_options import with_fields
from radix_jax.config import EngineConfig

if TYPE_CHECKING:
    from radix_jax.aot.report import ModelReport

_SETTINGS = (
    "page_size",
    "max_model_len",
    "max_running_requests",
    "max_prefill_tokens",
    "dtype",
    "kv_dtype",
    "attention_backend",
)
_DEFAULT_CONTEXT_LEN = 4096
_TABLE_WIDTH = 110  # that all columns need; narrower terminals break the lines


@with_fields("config", EngineConfig, _SETTINGS)
def aot(
    config: EngineConfig,
    target: Annotated[str, typer.Option(help="h200, h100, a100, l4 or rtx4090")] = "h200",
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="a shape (smollm2-135m, llama3-1b, llama3-8b, qwen2.5-7b, qwen3-8b), folder, .gguf file or hub id",
        ),
    ] = "llama3-8b",
    context: Annotated[
        int | None, typer.Option(help="tokens a row has in the counts; 4,096 or the model's own")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Compile a model's steps for a GPU that is not there, and say what they will cost.

    For decode and prefill, each in its largest bucket: compile time, memory, bytes and operations, the least time by
    the target's data sheet, and how many pages fit. No weights are read. Needs: pip install 'radix_jax[aot]'.
    """
    # Read when jax first looks for devices; nothing here runs on one.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from radix_jax.aot.compiling import check_installed, use_cpu
    from radix_jax.aot.report import model_config, report_model
    from radix_jax.aot.steps import settings_of
    from radix_jax.aot.targets import target_of

    use_cpu()
    found = target_of(target)
    check_installed()
    shape = model_config(model)
    settings = settings_of(config, shape)
    context_len = min(_DEFAULT_CONTEXT_LEN, settings.max_model_len) if context is None else context
    if not 1 <= context_len <= settings.max_model_len:
        raise ValueError(f"context={context_len} is outside [1, {settings.max_model_len}], max_model_len")
    report = report_model(found, model, shape, settings, context_len)
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        _print_report(report, found.memory_bytes)


def _print_report(report: "ModelReport", memory_bytes: int) -> None:
    from radix_jax.aot.report import JAX_MEMORY_FRACTION
    from radix_jax.runner.resolve import DEFAULT_MEMORY_FRACTION

    console = Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH)
    title = (
        f"{report.model} on {report.target}, {report.settings.dtype}, attention by {report.settings.attention_backend}"
    )
    table = Table(title=title)
    for column in (
        "step",
        "tokens",
        "rows",
        "context",
        "compile s",
        "temporaries",
        "moves",
        "GFLOP",
        "at least",
        "bound",
    ):
        table.add_column(column, justify="left" if column in ("step", "bound") else "right")
    for step in report.steps:
        table.add_row(
            step.kind,
            str(step.num_tokens),
            str(step.num_rows),
            str(step.context_len),
            f"{step.lower_s + step.compile_s:.1f}",
            f"{step.temp_bytes / 1e6:.0f} MB",
            f"{step.moved_bytes / 1e9:.2f} GB",
            f"{step.flop / 1e9:.0f}",
            f"{step.roofline_s * 1e3:.2f} ms",
            step.bound,
        )
    console.print(table)
    kernels = Table(title="kernels")
    for column in ("step", "kernel", "registers", "spilled bytes", "shared bytes", "programs", "threads"):
        kernels.add_column(column, justify="left" if column in ("step", "kernel") else "right")
    for step in report.steps:
        for one in step.kernels:
            numbers = (one.registers, one.spilled_bytes, one.shared_bytes, one.programs, one.num_threads)
            kernels.add_row(step.kind, one.name, *map(str, numbers))
    console.print(kernels)
    step = report.steps[0]
    console.print(
        f"{memory_bytes / 1e9:.1f} GB, of which jax takes {JAX_MEMORY_FRACTION:.0%}: weights "
        f"{step.weights_bytes / 1e9:.2f} GB, pool of {report.num_pages:,} pages, {step.pool_bytes / 1e9:.2f} GB, "
        f"{DEFAULT_MEMORY_FRACTION:.0%} of what is left at most: {report.kv_tokens:,} tokens, {report.num_requests:,} "
        f"requests of {report.settings.max_model_len:,}"
    )
