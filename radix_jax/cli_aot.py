"""radix-jax aot: a model's steps on an accelerator that is not there."""

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
_GPU_COLUMNS = {
    "registers": "registers",
    "spilled bytes": "spilled_bytes",
    "shared bytes": "shared_bytes",
    "programs": "programs",
    "threads": "num_threads",
}
_TPU_COLUMNS = {
    "launches": "launches",
    "bundles": "bundles",
    "of the main loop": "main_loop_bundles",
    "spills": "spills",
    "copies": "copies",
    "VMEM bytes": "vmem_bytes",
}


@with_fields("config", EngineConfig, _SETTINGS)
def aot(
    config: EngineConfig,
    target: Annotated[
        str,
        typer.Option(
            help="h200, h100, a100, l4, rtx4090, v4, v5e, v5p, v6e or v7x, or a topology: v5e:2x4, v6e:2x2, tpu7x:2x2x1"
        ),
    ] = "h200",
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
    """Compile a model's steps for a GPU or TPU that is not there, and say what they will cost.

    For decode and prefill, each in its largest bucket: compile time, memory, bytes and operations, the least time by
    the target's data sheet, and how many pages fit. No weights are read. Needs: pip install 'radix_jax[aot]', for a TPU
    'radix_jax[aot-tpu]'. Of a topology the steps are those of one device, with the whole model on it.
    """
    # Read when jax first looks for devices; nothing here runs on one.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from radix_jax.aot.compiling import check_installed, use_cpu
    from radix_jax.aot.devices import find_target
    from radix_jax.aot.report import model_config, report_model, usable_bytes
    from radix_jax.aot.steps import settings_of
    from radix_jax.aot.tpu_compiling import TpuCompileError, check_libtpu
    from radix_jax.aot.tpu_targets import TpuTarget

    use_cpu()
    found = find_target(target)
    is_tpu = isinstance(found, TpuTarget)
    (check_libtpu if is_tpu else check_installed)()
    shape = model_config(model)
    settings = settings_of(config, shape, "tpu" if is_tpu else "gpu")
    context_len = min(_DEFAULT_CONTEXT_LEN, settings.max_model_len) if context is None else context
    if not 1 <= context_len <= settings.max_model_len:
        raise ValueError(f"context={context_len} is outside [1, {settings.max_model_len}], max_model_len")
    try:
        report = report_model(found, model, shape, settings, context_len)
    except TpuCompileError as error:
        raise ValueError(f"the steps of {model} do not compile for {target}: {error}") from error
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        _print_report(report, found.memory_bytes, usable_bytes(found))


def _print_report(report: "ModelReport", memory_bytes: int, usable_bytes: int) -> None:
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
    _print_kernels(console, report)
    if ":" in report.target:
        console.print("of one device of the topology, with the whole model on it")
    step = report.steps[0]
    console.print(
        f"{memory_bytes / 1e9:.1f} GB, of which jax takes {usable_bytes / memory_bytes:.0%}: weights "
        f"{step.weights_bytes / 1e9:.2f} GB, pool of {report.num_pages:,} pages, {step.pool_bytes / 1e9:.2f} GB, "
        f"{DEFAULT_MEMORY_FRACTION:.0%} of what is left at most: {report.kv_tokens:,} tokens, {report.num_requests:,} "
        f"requests of {report.settings.max_model_len:,}"
    )


def _print_kernels(console: Console, report: "ModelReport") -> None:
    kernels = [(step.kind, dataclasses.asdict(one)) for step in report.steps for one in step.kernels]
    columns = _TPU_COLUMNS if any("vmem_bytes" in one for _, one in kernels) else _GPU_COLUMNS
    table = Table(title="kernels")
    for column in ("step", "kernel", *columns):
        table.add_column(column, justify="left" if column in ("step", "kernel") else "right")
    for kind, one in kernels:
        table.add_row(kind, one["name"], *(str(one[name]) for name in columns.values()))
    console.print(table)
