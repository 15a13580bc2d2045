"""What the compiler makes of the GPU kernels, without a GPU: python -m benchmarks.gpu_static [--json] [--target h200]

One row a kernel, shape and target: registers, spilled bytes, shared memory, 16-byte asynchronous copies, tensor-core
instructions, atomics. Needs: pip install 'radix_jax[aot]'. benchmarks/results/gpu_static.json holds the rows of several
releases of jax; a release's are written anew by:
    python -m benchmarks.gpu_static --record benchmarks/results/gpu_static.json --target h200 --target a100 --target l4
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from radix_jax.aot.compiling import check_installed, compile_for, use_cpu
from radix_jax.aot.kernel_report import KernelReport
from radix_jax.aot.targets import Target, target_of
from radix_jax.pallas_kernels.paged_attention import paged_attention, write_kv

NUM_ROWS = 64
NUM_TOKENS = 2048
CONTEXT_LEN = 4096
# KV of 64 rows of that context and some more; above 2**31 elements at 8 heads of 128.
POOL_LEN = 2 * NUM_ROWS * CONTEXT_LEN


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for. kv_dtype: of the pool."""

    head_dim: int
    page_size: int = 16
    num_q_heads: int = 32
    num_kv_heads: int = 8
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    sliding_window: int | None = None
    logit_soft_cap: float | None = None


@dataclass(frozen=True)
class StaticRow:
    """One kernel of one shape on one target, by one release of jax.

    kernel: "decode", "combine", "extend" or "write", and what is special.
    """

    kernel: str
    target: str
    page_size: int
    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    dtype: str
    kv_dtype: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    async_copies_16b: int
    tensor_core_instructions: int
    atomics: int
    num_threads: int
    jax: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What names the row among those of a release."""
        heads = self.num_q_heads, self.num_kv_heads
        return self.kernel, self.target, self.page_size, self.head_dim, *heads, self.dtype, self.kv_dtype


HEAD_DIMS = (64, 80, 96, 128, 256)
SHAPES = (
    *(Shape(head_dim, page_size) for head_dim in HEAD_DIMS for page_size in (1, 16, 64)),
    *(Shape(128, num_q_heads=q, num_kv_heads=kv) for q, kv in ((8, 8), (24, 8), (28, 4), (64, 8), (16, 1))),
    Shape(64, num_q_heads=9, num_kv_heads=3),
    Shape(128, sliding_window=1000, logit_soft_cap=30.0),
    *(Shape(head_dim, dtype="float16", kv_dtype="float16") for head_dim in (64, 128)),
    *(Shape(head_dim, dtype="float32", kv_dtype="float32") for head_dim in (64, 128)),
    *(Shape(128, kv_dtype=kv_dtype) for kv_dtype in ("float8_e4m3fn", "float8_e5m2")),
)


def measure(target: Target, shape: Shape) -> list[StaticRow]:
    """The rows of a shape: decode, combine, extend and write."""
    compiled: dict[str, KernelReport] = {}
    for fn, args, donated in programs(shape):
        compiled |= {report.name: report for report in compile_for(target, fn, *args, donate_argnums=donated).kernels}
    special = "" if shape.sliding_window is None else " window cap"
    return [
        StaticRow(
            kernel=kernel + special,
            target=target.name,
            page_size=shape.page_size,
            head_dim=shape.head_dim,
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            dtype=shape.dtype,
            kv_dtype=shape.kv_dtype,
            registers=report.registers,
            spilled_bytes=report.spilled_bytes,
            shared_bytes=report.shared_bytes,
            async_copies_16b=report.async_copies_16b,
            tensor_core_instructions=report.tensor_core_instructions,
            atomics=report.atomics,
            num_threads=report.num_threads,
            jax=jax.__version__,
        )
        for kernel in ("decode", "combine", "extend", "write")
        for report in [compiled[f"{kernel}_kernel"]]
    ]


def programs(shape: Shape) -> list[tuple[Any, tuple[Any, ...], tuple[int, ...]]]:
    """(function, abstract arguments, donated ones) of a step's attention, with decode, combine and extend in it, and of
    the write."""
    width = 2 * shape.num_kv_heads * shape.head_dim
    pool = abstract((POOL_LEN // shape.page_size, shape.page_size, width), shape.kv_dtype)
    rows = (
        abstract((NUM_ROWS, CONTEXT_LEN // shape.page_size), "int32"),
        abstract((NUM_ROWS,), "int32"),
        abstract((NUM_ROWS + 1,), "int32"),
    )
    attend = functools.partial(
        paged_attention,
        page_offset=0,
        scale=shape.head_dim**-0.5,
        sliding_window=shape.sliding_window,
        logit_soft_cap=shape.logit_soft_cap,
        backend="pallas_gpu",
    )
    q = abstract((NUM_TOKENS, shape.num_q_heads, shape.head_dim), shape.dtype)
    new = abstract((NUM_TOKENS, shape.num_kv_heads, shape.head_dim), shape.dtype)
    write = functools.partial(write_kv, page_offset=0, backend="pallas_gpu")
    return [
        (attend, (q, pool, *rows), ()),
        (write, (pool, new, new, abstract((NUM_TOKENS,), "int32")), (0,)),
    ]


def abstract(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    """An array of that shape that takes no memory."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def read_rows(path: Path) -> list[StaticRow]:
    """The rows of a record."""
    return [StaticRow(**row) for row in json.loads(path.read_text())]


def record(path: Path, rows: list[StaticRow]) -> None:
    """Put `rows` in the place of those that `path` has of their releases and targets."""
    replaced = {(row.jax, row.target) for row in rows}
    kept = [row for row in read_rows(path) if (row.jax, row.target) not in replaced] if path.exists() else []
    lines = ",\n".join(json.dumps(asdict(row)) for row in sorted(kept + rows, key=lambda row: row.jax))
    path.write_text(f"[\n{lines}\n]\n")


def supported(target: Target, shape: Shape) -> bool:
    """Whether the target can do it: float8_e4m3 needs compute capability 8.9."""
    return shape.kv_dtype != "float8_e4m3fn" or target.capability != "8.0"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="gpu_static", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line, a JSON list of rows")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the rows into a file")
    parser.add_argument("--target", action="append", help="h200, h100, a100, l4 or rtx4090; may be repeated")
    args = parser.parse_args(argv)
    use_cpu()
    try:
        check_installed()
    except ImportError as error:
        sys.exit(f"error: {error}")
    wanted = [target_of(name) for name in args.target or ["h200"]]
    rows = [row for target in wanted for shape in SHAPES if supported(target, shape) for row in measure(target, shape)]
    if args.record:
        record(args.record, rows)
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table()
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*map(str, asdict(row).values()))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
