"""radix-jax replay: a trace on the scheduler, without a model."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from radix_jax.cli_options import with_fields
from radix_jax.config import EngineConfig
from radix_jax.replay import CostModel, ReplayReport, SweepAxes, Trace, read_trace, run_sweep
from radix_jax.replay.plots import table_rows, write_html, write_png

_SETTINGS = (
    "page_size",
    "num_pages",
    "max_model_len",
    "max_running_requests",
    "max_prefill_tokens",
    "schedule_policy",
    "eviction_policy",
    "enable_prefix_cache",
    "partial_pages",
)
_DEFAULT_POOL_TOKENS = 1_000_000
_TABLE_WIDTH = 130  # that all columns need; narrower terminals break the lines

Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        help="try several values: eviction=lru,reuse-rate  schedule=fcfs,lpm  page-size=16,64  pool=500000,2000000 "
        "(tokens); give it once for each setting, every combination is run",
    ),
]


@with_fields("config", EngineConfig, _SETTINGS, max_running_requests=256, max_prefill_tokens=8192)
@with_fields("costs", CostModel)
def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake's JSONL, a recording, or Azure's CSV")],
    config: EngineConfig,
    costs: CostModel,
    sweep: Sweep = None,
    limit: Annotated[int | None, typer.Option(help="requests to read, from the start")] = None,
    speed: Annotated[float, typer.Option(help="how many times as fast the requests arrive")] = 1.0,
    optimum: Annotated[bool, typer.Option(help="compare with evictions that know the future")] = True,
    plot: Annotated[list[Path] | None, typer.Option(help="write a picture: FILE.png or FILE.html")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object a run")] = False,
) -> None:
    """Run a trace through the scheduler, without a model.

    The clock is virtual and steps take what the cost options say. Shows what a policy, a page size or a size of the
    pool does to hit rate and latency. Without --num-pages the pool holds a million tokens; without --max-model-len the
    context holds the longest request of the trace.
    """
    for path in plot or ():
        if path.suffix not in (".png", ".html"):
            raise ValueError(f"--plot {path}: the name must end in .png or .html")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} is below its least value 1")
    if config.num_pages is None:
        config = dataclasses.replace(config, num_pages=_DEFAULT_POOL_TOKENS // config.page_size + 1)
    requests = read_trace(trace, limit).sped_up(speed)
    axes = _axes(sweep or [], config)
    reports = _run(requests, axes.configs(config), costs, optimum)
    if as_json:
        for report in reports:
            print(json.dumps(report.as_dict()))
    elif len(reports) == 1:
        print(_as_text(reports[0]))
    else:
        _print_table(reports)
    for path in plot or ():
        (write_png if path.suffix == ".png" else write_html)(reports, path)


def _axes(sweep: list[str], config: EngineConfig) -> SweepAxes:
    """The values to try; a setting that is not swept has the one of `config`."""
    assert config.num_pages is not None
    values: dict[str, list[str]] = {}
    for one in sweep:
        name, _, listed = one.partition("=")
        if name not in ("eviction", "schedule", "page-size", "pool") or not listed or name in values:
            raise ValueError(
                f"--sweep {one}: give each of eviction, schedule, page-size and pool at most once, as NAME=VALUE,VALUE"
            )
        values[name] = listed.split(",")
    return SweepAxes(
        schedule_policies=values.get("schedule", [config.schedule_policy]),
        eviction_policies=values.get("eviction", [config.eviction_policy]),
        page_sizes=[int(value) for value in values.get("page-size", [str(config.page_size)])],
        pool_tokens=[int(value) for value in values.get("pool", [str((config.num_pages - 1) * config.page_size)])],
    )


def _run(trace: Trace, configs: list[EngineConfig], costs: CostModel, optimum: bool) -> list[ReplayReport]:
    """All runs, with a progress bar on standard error."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("replay", total=len(configs) * len(trace))

        def tell(num_done: int, num_ended: int) -> None:
            progress.update(task, completed=num_done * len(trace) + num_ended)

        return run_sweep(trace, configs, costs, optimum=optimum, on_progress=tell)


def _print_table(reports: list[ReplayReport]) -> None:
    """A row a run; what is the same in all of them is told once, below."""
    headings, rows = table_rows(reports)
    same = [len(set(column)) == 1 for column in zip(*rows, strict=True)]
    shared = ", ".join(f"{name} {cell}" for name, cell, is_same in zip(headings, rows[0], same, strict=True) if is_same)
    table = Table()
    for name, is_same in zip(headings, same, strict=True):
        if not is_same:
            table.add_column(name, justify="left" if name in headings[:2] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*itertools.compress(row, [not is_same for is_same in same]))
    print(f"{reports[0].trace}: {reports[0].num_requests:,} requests")
    Console(width=max(Console().width, _TABLE_WIDTH)).print(table)
    print(f"the same in all: {shared}")


def _as_text(report: ReplayReport) -> str:
    """The figures of one run, a line each."""
    lines: list[tuple[str, Any]] = []
    for field in dataclasses.fields(report):
        value = getattr(report, field.name)
        if dataclasses.is_dataclass(value):
            value = "  ".join(
                f"{part.name[:-2]} {getattr(value, part.name):.3f} s" for part in dataclasses.fields(value)
            )
        elif isinstance(value, dict):
            value = "  ".join(f"{name} {count:,}" for name, count in value.items())
        elif isinstance(value, float):
            value = f"{value:.4f}"
        elif isinstance(value, int):
            value = f"{value:,}"
        lines.append((field.name.replace("_", " "), "-" if value is None else value))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
