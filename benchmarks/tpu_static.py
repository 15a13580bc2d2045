"""What Mosaic makes of the TPU kernels, without a TPU: python -m benchmarks.tpu_static [--json] [--target v5e]

One row a kernel, shape and target: ours, jax's own two, and any that --kernel names, as import.path:function with the
contract of docs/kernels.md. A bundle is one instruction word, at least one cycle; stalls are not counted, so figures
are lower bounds. Of a kernel's loops the main one has the most matmuls.

bundles_per_512: of the main loop, for 512 tokens of a row and all its kv heads: the cheapest way through its body that
  has all its matmuls and copies, loops of page copies in it as often as the pages need, times the passes for 512
  tokens; of a kernel of chunks, for 128 query tokens.
bundles_per_seq: of a whole row of `context` tokens (a chunk is its last 128): one longest way through the main loop,
  whose extra bundles start, mask and finish a row; for its other blocks the cheapest way; what the loops around it run
  for one row; and the row's share of what runs once a call. Where masked blocks have a loop of their own, they are
  counted as if they had none.
peak_share: of what the matrix units could multiply in bundles_per_512, what the scores and values of 512 tokens need.
cycles_per_512: of our decode kernel, the cycles of 512 tokens of a row and all its kv heads by libtpu's own estimate,
  which has stalls (v6e and v7x, else null). benchmarks/tpu_cycles.py tells how; by hand, for the shape of a row:
      from benchmarks.tpu_cycles import item_cycles
      item_cycles(tpu_target_of("v6e"), [Shape(page_size=128)])
matmul_share, vector_share: of the slots of matrix and vector units, over all bundles of the main loop.
bundles: of the whole code, each counted once; the others are null for kernels without a matmul.
spills: stores of vector registers that the code lacked room for. vmem_mib: what XLA set aside for the kernel.
kv_write: whether the kernel writes the new tokens' K and V too.

Needs libtpu: pip install libtpu. benchmarks/results/tpu_static.json holds the rows of a release of jax and libtpu; they
are written anew by:
    python -m benchmarks.tpu_static --record benchmarks/results/tpu_static.json --target v5e --target v6e --target v7x
"""

import argparse
import importlib.metadata
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tpu_cycles import TOKENS, item_cycles
from benchmarks.tpu_peers import Q_LEN, TABLE_LEN, Measured, Shape, kernels_of
from radix_jax.aot.compiling import use_cpu
from radix_jax.aot.tpu_bundles import Program
from radix_jax.aot.tpu_compiling import TpuCompileError, TpuJob, compile_all
from radix_jax.aot.tpu_report import TpuKernel
from radix_jax.aot.tpu_targets import TpuTarget, tpu_target_of


@dataclass(frozen=True)
class StaticRow:
    """One kernel of one shape on one target; see the module. bundles_* are None where the block length is not known."""

    source: str
    kernel: str
    target: str
    page_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    kv_write: bool
    bundles: int
    bundles_per_512: int | None
    bundles_per_seq: int | None
    peak_share: float | None
    cycles_per_512: int | None
    spills: int
    fills: int
    vmem_mib: float
    copies: int
    main_loop_bundles: int
    matmul_share: float
    vector_share: float
    kv_dtype: str
    jax: str
    libtpu: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What names the row among those of a release."""
        heads = self.num_q_heads, self.num_kv_heads, self.head_dim
        return self.source, self.kernel, self.target, self.page_size, *heads, self.context, self.kv_dtype


# Llama 3 8B and SmolLM2-135M, a kv head a chip, Llama 3.2 1B, Qwen 2.5 7B, Gemma 2 2B.
DECODE_SHAPES = (
    *(Shape(page_size=page_size, context=context) for page_size in (16, 32, 128) for context in (2048, 100)),
    *(Shape(page_size=16, context=context, num_q_heads=9, num_kv_heads=3, head_dim=64) for context in (2048, 100)),
    Shape(page_size=128, num_q_heads=9, num_kv_heads=3, head_dim=64),
    Shape(page_size=16, num_q_heads=4, num_kv_heads=1),
    Shape(page_size=16, num_q_heads=32, num_kv_heads=8, head_dim=64),
    Shape(page_size=16, num_q_heads=28, num_kv_heads=4),
    Shape(page_size=16, num_q_heads=8, num_kv_heads=4, head_dim=256),
    Shape(page_size=32, kv_dtype="float8_e4m3fn"),
)
MIXED_SHAPES = (
    *(Shape(num_rows=16, num_tokens=2048, page_size=page_size) for page_size in (16, 128)),
    Shape(num_rows=16, num_tokens=2048, num_q_heads=9, num_kv_heads=3, head_dim=64),
    Shape(num_rows=16, num_tokens=2048, num_q_heads=8, num_kv_heads=4, head_dim=256),
    Shape(num_rows=16, num_tokens=2048, num_q_heads=28, num_kv_heads=4),
)


def measure(target: TpuTarget, kernels: Sequence[Measured]) -> tuple[list[StaticRow], list[str]]:
    """(the rows, a line for each kernel that does not compile)."""
    cycles, refused = _cycles(target, kernels)
    rows = []
    # Shapes that differ in the context alone are one program.
    jobs = {kernel.program: TpuJob(kernel.fn, kernel.args, kernel.donate_argnums) for kernel in kernels}
    compiled = dict(zip(jobs, compile_all(target, [*jobs.values()]), strict=True))
    for kernel in kernels:
        result = compiled[kernel.program]
        named = f"{kernel.source} {kernel.kernel} {kernel.shape} on {target.name}"
        if isinstance(result, TpuCompileError):
            refused.append(f"{named}: {_first_line(result)}")
        elif not result.kernels:
            refused.append(f"{named}: it calls no Pallas kernel, so there are no bundles to count")
        else:
            figures, program = max(zip(result.kernels, result.bundles, strict=True), key=lambda pair: pair[0].bundles)
            rows.append(_row(target, kernel, figures, program, cycles.get(kernel.program)))
    return rows, refused


def _row(target: TpuTarget, kernel: Measured, compiled: TpuKernel, program: Program, cycles: int | None) -> StaticRow:
    shape = kernel.shape
    per_512, per_seq = _per_row(target, kernel, program)
    return StaticRow(
        source=kernel.source,
        kernel=kernel.kernel,
        target=target.name,
        page_size=shape.page_size,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        context=shape.context,
        kv_write=kernel.kv_write,
        bundles=compiled.bundles,
        bundles_per_512=per_512,
        bundles_per_seq=per_seq,
        peak_share=_peak_share(target, kernel, per_512),
        cycles_per_512=cycles,
        spills=compiled.spills,
        fills=compiled.fills,
        vmem_mib=round(compiled.vmem_bytes / 2**20, 2),
        copies=compiled.copies,
        main_loop_bundles=compiled.main_loop_bundles,
        matmul_share=compiled.matmul_share,
        vector_share=compiled.vector_share,
        kv_dtype=shape.kv_dtype,
        jax=jax.__version__,
        libtpu=importlib.metadata.version("libtpu"),
    )


def _cycles(target: TpuTarget, kernels: Sequence[Measured]) -> tuple[dict[tuple[Any, ...], int], list[str]]:
    """(cycles_per_512 by what names a program, a line for each shape for which libtpu does not tell)."""
    # Of shapes that differ in the context alone an item is the same.
    programs = {k.program: replace(k.shape, context=TABLE_LEN) for k in kernels if _has_cycles(k)}
    told = item_cycles(target, [*programs.values()])
    refused = [
        f"cycles of {shape} on {target.name}: {_first_line(one)}"
        for shape, one in told.items()
        if isinstance(one, TpuCompileError)
    ]
    return {name: one for name, shape in programs.items() if isinstance(one := told.get(shape), int)}, refused


def _has_cycles(kernel: Measured) -> bool:
    return (kernel.source, kernel.kernel) == ("ours", "decode")


def _peak_share(target: TpuTarget, kernel: Measured, per_512: int | None) -> float | None:
    shape = kernel.shape
    num_queries = 1 if kernel.kernel == "decode" else Q_LEN
    flop = 4 * num_queries * TOKENS * shape.num_q_heads * shape.head_dim
    return None if per_512 is None else round(flop / (per_512 * target.matmul_flop_per_cycle), 4)


def _per_row(target: TpuTarget, kernel: Measured, program: Program) -> tuple[int | None, int | None]:
    """(bundles_per_512, bundles_per_seq)."""
    main = program.main_loop
    if main is None:
        return None, None
    shape = kernel.shape
    block_len = kernel.block_len or _copied_len(target, kernel, program, main)
    if block_len is None:
        return None, None
    steady = program.steady(main, _trips(program, block_len / shape.page_size)).bundles
    num_blocks = math.ceil(shape.context / block_len)
    last_pages = min(block_len, shape.context) / shape.page_size
    longest = program.longest(main, _trips(program, last_pages)).bundles
    around, once = _outside(kernel, program, main)
    per_seq = kernel.passes * ((num_blocks - 1) * steady + longest) + around + once / shape.num_rows
    return round(kernel.passes * steady * TOKENS / block_len), round(per_seq)


def _trips(program: Program, num_pages: float) -> Any:
    """How often loops inside the main loop run: those that copy as the pages need, all others once."""

    def trips(index: int) -> int:
        copies = program.steady(index, lambda inner: 1).copies_in
        return math.ceil(num_pages / copies) if copies else 1

    return trips


def _copied_len(target: TpuTarget, kernel: Measured, program: Program, main: int) -> int | None:
    """Tokens that one iteration copies, from the sizes in the code; None where they are not there."""
    shape = kernel.shape
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * jax.numpy.dtype(shape.kv_dtype).itemsize
    copied = program.steady(main, lambda inner: 1).copied_granules * target.granule_bytes
    return int(copied * kernel.passes) // token_bytes or None


def _outside(kernel: Measured, program: Program, main: int) -> tuple[float, float]:
    """Bundles of (the loops around the main one, for one row; what is in no loop that holds it, for one call)."""
    loops = []
    index = program.loops[main].parent
    while index is not None:
        loops.append(index)
        index = program.loops[index].parent
    around = sum(
        program.around(index).bundles * runs
        for index, runs in zip(loops, (*kernel.runs_around, *[1.0] * len(loops)), strict=False)
    )
    outermost = program.loops[loops[-1] if loops else main]
    return around, program.total.bundles - (outermost.last - outermost.first + 1)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]


def read_rows(path: Path) -> list[StaticRow]:
    """The rows of a record."""
    return [StaticRow(**row) for row in json.loads(path.read_text())]


def record(path: Path, rows: list[StaticRow]) -> None:
    """Put `rows` in the place of those that `path` has of their releases and targets."""
    replaced = {(row.jax, row.libtpu, row.target) for row in rows}
    kept = read_rows(path) if path.exists() else []
    kept = [row for row in kept if (row.jax, row.libtpu, row.target) not in replaced]
    lines = ",\n".join(json.dumps(asdict(row)) for row in sorted(kept + rows, key=lambda row: row.jax))
    path.write_text(f"[\n{lines}\n]\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="tpu_static", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line, a JSON list of attention's rows")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the rows into a file")
    parser.add_argument("--target", action="append", help="v5e, v6e, v7x, v5p or v4; may be repeated; v5e by default")
    parser.add_argument("--kernel", action="append", metavar="PATH:FN", default=[], help="measure this one as well")
    parser.add_argument("--block-len", type=int, help="tokens its main loop takes at a time; else by its copies")
    args = parser.parse_args(argv)
    use_cpu()
    rows: list[StaticRow] = []
    refused: list[str] = []
    for name in args.target or ["v5e"]:
        target = tpu_target_of(name)
        kernels = kernels_of(target.generation, DECODE_SHAPES, MIXED_SHAPES, args.kernel, args.block_len)
        measured = measure(target, kernels)
        rows += measured[0]
        refused += measured[1]
    if args.record:
        record(args.record, rows)
    for line in refused:
        print(line, file=sys.stderr)
    if args.json:
        print(json.dumps([asdict(row) for row in rows if row.kernel != "write"]))
        return
    table = Table()
    for column in StaticRow.__dataclass_fields__:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*map(str, asdict(row).values()))
    Console(width=240).print(table)


if __name__ == "__main__":
    main()
