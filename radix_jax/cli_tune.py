"""radix-jax tune: the GPU kernels' block sizes, measured on the GPU at hand."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from radix_jax.config import Dtype, KVDtype

if TYPE_CHECKING:
    from radix_jax.tune import Blocks, Trial, Tuned

_DEFAULT_MODEL = "llama3-8b"
_TABLE_WIDTH = 110  # that all columns need; narrower terminals break the lines
_Heads = tuple[int, int, int]


def tune(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="whose heads: a shape as of `radix-jax aot`, folder, .gguf file or hub id"),
    ] = None,
    num_heads: Annotated[int | None, typer.Option(min=1, help="query heads, in place of --model")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(min=1, help="kv heads, in place of --model")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="lanes of a head, in place of --model")] = None,
    dtype: Annotated[Dtype, typer.Option(help="of the queries")] = "bfloat16",
    kv_dtype: Annotated[KVDtype | None, typer.Option(help="of the pool; that of the queries")] = None,
    page_size: Annotated[int, typer.Option(min=1, help="tokens a page")] = 16,
    max_running_requests: Annotated[int, typer.Option(min=1, help="rows of a decode step")] = 64,
    context: Annotated[int, typer.Option(min=1, help="tokens of each row")] = 4096,
) -> None:
    """Measure block sizes of the GPU kernels on this machine's GPU, and keep the best for this user.

    Takes minutes: every size is compiled, compared with the XLA form, and timed. Without a GPU nothing is written.
    """
    from radix_jax.tune import TuneShape, check_device, write_choices
    from radix_jax.tune import tune as measure

    device_kind = check_device()
    shape = TuneShape(
        *_heads_of(model, (num_heads, num_kv_heads, head_dim)),
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        page_size=page_size,
        num_rows=max_running_requests,
        context_len=context,
    )
    columns = SpinnerColumn(), TextColumn("{task.completed} choices tried"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("tune", total=None)

        def tell(_: "Trial") -> None:
            progress.advance(task)

        found = measure(shape, on_trial=tell)
    print_tuned(device_kind, found)
    better = [tuned.entry for tuned in found if tuned.entry is not None]
    if better:
        print(f"written to {write_choices(device_kind, better)}")
    else:
        print("the blocks in use are the best; nothing was written")


def _heads_of(model: str | None, heads: tuple[int | None, int | None, int | None]) -> _Heads:
    """(query heads, kv heads, lanes of a head).

    Raises:
        ValueError: some but not all of them are given, or a model beside them.
    """
    num_heads, num_kv_heads, head_dim = heads
    if num_heads is not None and num_kv_heads is not None and head_dim is not None:
        if model is not None:
            raise ValueError("give --model, or --num-heads, --num-kv-heads and --head-dim, not both")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
        return num_heads, num_kv_heads, head_dim
    if heads != (None, None, None):
        raise ValueError("--num-heads, --num-kv-heads and --head-dim go together; give all three, or --model")
    from radix_jax.aot.report import model_config

    config = model_config(model or _DEFAULT_MODEL)
    return config.num_heads, config.num_kv_heads, config.head_dim


def print_tuned(device_kind: str, found: Sequence["Tuned"]) -> None:
    """A table of the best blocks and how much quicker they are."""
    table = Table(title=f"blocks of the GPU kernels on {device_kind}")
    for column in ("kernel", "in use", "µs", "best", "µs", "quicker", "tried", "unfit"):
        table.add_column(column, justify="left" if column in ("kernel", "in use", "best") else "right")
    for tuned in found:
        table.add_row(
            tuned.kernel,
            _as_text(tuned.before),
            f"{tuned.before_s * 1e6:.1f}",
            _as_text(tuned.best),
            f"{tuned.best_s * 1e6:.1f}",
            f"{tuned.before_s / tuned.best_s - 1:.0%}" if tuned.best_s else "-",
            str(tuned.num_trials),
            str(tuned.num_faults),
        )
    Console(width=max(Console().width, _TABLE_WIDTH)).print(table)


def _as_text(blocks: "Blocks") -> str:
    return " ".join(f"{name.removeprefix('num_')} {value}" for name, value in vars(blocks).items())
