"""The radix tree beside other prefix caches: python -m benchmarks.radix_tree [--sglang DIR] [--json] [--plot FILE]

One command measures everything: time, eviction from up to a million leaves, memory (on Linux). Every cache does the
same calls in turn, many times over, on one thread; see `benchmarks.tree_measures`. Keys and values are in the form that
a cache takes them in, made before the clock starts. A match is of a key that was matched just before, and includes its
pages. In the trace all caches must find the same cached tokens for every request, else the run fails. A per-token trie
stands beside the tree: nodes, nodes visited, bytes. `--sglang` names a folder with SGLang's unpacked wheel (see
`benchmarks.sglang_trees`, which also needs torch).
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.prefix_trace import TraceShape, make_trace
from benchmarks.sglang_trees import load_sglang, sglang_version
from benchmarks.token_trie import TrieComparison, compare_with_trie
from benchmarks.tree_measures import (
    Makers,
    Row,
    measure_evictions,
    measure_insert,
    measure_match,
    measure_trace,
    plain_row,
)
from benchmarks.tree_memory import STATUS, bytes_per_token
from benchmarks.tree_peers import OurTree, PageHashes, PrefixIndex
from benchmarks.tree_plot import check_plot, plot_rows

TRIE_REQUESTS = 128
# Threads that wait by spinning would count as processor time of the sample that runs.
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Only in the trace: what no other cache does.
VARIANTS: Makers = {
    "radix_jax, insert resumed at the lock": partial(OurTree, resume=True),
    "radix_jax, resumed, partial pages": partial(OurTree, resume=True, partial_pages=True),
}


@dataclass(frozen=True)
class Machine:
    """Where the figures come from."""

    cpu: str
    num_cpus: int
    python: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Report:
    """All figures of a run. found: prompt tokens that every cache found in the trace, by page size."""

    benchmark: str
    machine: Machine
    rows: list[Row]
    found: dict[int, int]
    trie: TrieComparison


def run(options: argparse.Namespace) -> Report:
    """Measure everything that the options ask for."""
    trees: dict[str, Callable[[int], PrefixIndex]] = {OurTree.name: OurTree}
    if options.sglang:
        trees |= load_sglang(options.sglang)
    paged: Makers = trees | {PageHashes.name: PageHashes}
    trace = make_trace(TraceShape(num_requests=options.requests))
    rows = [
        _tell(measure_match(paged, 8192, 1, options.repeats)),
        _tell(measure_match(paged, 131072, 16, options.repeats)),
        _tell(measure_insert(paged, options.repeats)),
    ]
    found: dict[int, int] = {}
    for page_size, makers in ((1, trees), (16, paged)):  # a hash a token is no use to anyone
        row, found[page_size] = measure_trace({**makers, **VARIANTS}, trace, page_size, options.repeats)
        rows.append(_tell(row))
    rows += [_tell(row) for row in measure_evictions(trees, options.leaves, options.repeats)]
    if STATUS.exists():
        rows.append(_tell(measure_memory(list(paged), options.sglang)))
    return Report("radix_tree", describe_machine(options.sglang), rows, found, compare_with_trie(trace, TRIE_REQUESTS))


def _tell(row: Row) -> Row:
    """Say on the error stream that a row is done: a run takes minutes."""
    print(row, file=sys.stderr, flush=True)
    return row


def measure_memory(names: Sequence[str], sglang: Path | None) -> Row:
    """Bytes a cached token of each cache, in a process of its own."""
    return plain_row(
        "memory of a cached token, 1k-token nodes, P=16",
        "bytes",
        {name: bytes_per_token(partial(find_maker, name, sglang)) for name in names},
    )


def find_maker(name: str, sglang: Path | None) -> Callable[[int], PrefixIndex]:
    """The cache of that name, made from a page size."""
    ours: dict[str, Callable[[int], PrefixIndex]] = {OurTree.name: OurTree, PageHashes.name: PageHashes}
    return ours[name] if name in ours or sglang is None else load_sglang(sglang)[name]


def describe_machine(sglang: Path | None) -> Machine:
    """Processor and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    versions = {"numpy": np.__version__}
    if sglang is not None:
        versions |= {"sglang": sglang_version(sglang), "torch": import_module("torch").__version__}
    return Machine(cpu, os.cpu_count() or 0, platform.python_version(), versions)


def as_table(report: Report) -> str:
    """The report in Markdown."""
    names = list(dict.fromkeys(name for row in report.rows for name in row.values))
    lines = ["| | unit | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for row in report.rows:
        cells = [_cell(row, name) for name in names]
        lines.append(f"| {row.name} | {row.unit} | " + " | ".join(cells) + " |")
    trie, machine = report.trie, report.machine
    lines += [
        "",
        "Medians; in brackets how many times ours, the median of the quotients of each turn.",
        "",
        "Prompt tokens found in the trace, by every cache the same: "
        + ", ".join(f"{found:,} at P={page_size}" for page_size, found in report.found.items())
        + ".",
        "",
        f"| {trie.num_requests} requests, {trie.num_tokens:,} cached tokens, P=1 | token trie | radix tree |",
        "|---|---|---|",
        f"| nodes | {trie.trie_nodes:,} | {trie.tree_nodes:,} |",
        f"| nodes visited a match | {trie.trie_visits:,.1f} | {trie.tree_visits:.1f} |",
        f"| bytes a cached token | {trie.trie_bytes_per_token:.1f} | {trie.tree_bytes_per_token:.1f} |",
        "",
        f"{machine.cpu}, {machine.num_cpus} processors, Python {machine.python}, "
        + ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
    ]
    return "\n".join(lines)


def _cell(row: Row, name: str) -> str:
    if name not in row.values:
        return "-"
    value = row.values[name]
    text = f"{value:,.{0 if value >= 100 else 1}f}"
    return text if name == OurTree.name else f"{text} ({row.times_ours[name]:,.1f}x)"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.radix_tree", description="The radix tree beside other prefix caches."
    )
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="folder with SGLang's unpacked wheel")
    parser.add_argument("--requests", type=int, default=TraceShape().num_requests, help="in the trace (%(default)s)")
    parser.add_argument("--leaves", default="1000,100000,1000000", help="sizes to evict from (default: %(default)s)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=9,
        help="runs of the trace, and as many times five of what is quicker (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the table, as .svg or .png")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        try:
            check_plot(options.plot)
        except (ImportError, ValueError) as error:
            parser.error(f"--plot {options.plot}: {error}")
    options.leaves = [int(leaves) for leaves in options.leaves.split(",")]
    return options


def main() -> None:
    """Run it and print what came out."""
    options = parse_arguments()
    report = run(options)
    if options.plot is not None:
        plot_rows(report.rows, options.plot)
    print(json.dumps(asdict(report)) if options.json else as_table(report))


def restart_on_one_thread() -> None:
    """Begin again with one thread for the libraries that count them when they are loaded."""
    if any(os.environ.get(name) != number for name, number in ONE_THREAD.items()):
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.radix_tree", *sys.argv[1:]], os.environ | ONE_THREAD
        )


if __name__ == "__main__":
    restart_on_one_thread()
    main()
