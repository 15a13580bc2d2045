"""The benchmark of the tree compares equal work: every cache finds what the plainest one finds."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prefix_trace import Trace, TraceShape, make_trace
from benchmarks.radix_tree import ONE_THREAD, Machine, Report, as_table, main, parse_arguments, restart_on_one_thread
from benchmarks.sglang_trees import FolderFinder, StandIn, sglang_version
from benchmarks.token_trie import TokenTrie, TrieComparison, compare_with_trie
from benchmarks.trace_replay import Rehearsal, TimedReplay, rehearse
from benchmarks.tree_measures import (
    Row,
    in_turn,
    measure_evictions,
    measure_insert,
    measure_match,
    measure_trace,
    median_row,
    plain_row,
)
from benchmarks.tree_memory import STATUS, bytes_per_token
from benchmarks.tree_peers import OurTree, PageHashes, PrefixIndex
from benchmarks.tree_plot import plot_rows

SMALL = TraceShape(
    num_requests=120,
    num_system_prompts=4,
    num_open=12,
    num_in_flight=4,
    system_len=(40, 90),
    user_len=(5, 30),
    output_len=(5, 40),
)
MAKERS = {"radix_jax": OurTree, "resumed": partial(OurTree, resume=True, partial_pages=True), "page hashes": PageHashes}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(SMALL)


def common_len(first: np.ndarray, second: np.ndarray) -> int:
    shorter = min(len(first), len(second))
    differs = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differs[0]) if len(differs) else shorter


def found_by_comparison(trace: Trace, page_size: int) -> list[int]:
    """Each prompt compared with all that ended before, in full: what an unbounded cache finds."""
    ended: list[np.ndarray] = []
    found = [0] * len(trace.requests)
    for step in trace.steps:
        if step < 0:
            ids = trace.requests[~step].ids
            ended.append(ids[: len(ids) // page_size * page_size])
        else:
            request = trace.requests[step]
            prompt = request.ids[: request.prompt_len - 1]
            longest = max((common_len(prompt, other) for other in ended), default=0)
            found[step] = longest // page_size * page_size
    return found


def test_trace_is_what_its_shape_says(trace: Trace) -> None:
    assert sorted(step for step in trace.steps if step >= 0) == list(range(SMALL.num_requests))
    in_flight: list[int] = []
    for step in trace.steps:
        if step >= 0:
            in_flight.append(step)
        else:
            assert in_flight.pop(0) == ~step, "the oldest ends first"
        assert len(in_flight) <= SMALL.num_in_flight
    assert not in_flight
    continued = 0
    for number, request in enumerate(trace.requests):
        before = [other.ids for other in trace.requests[:number]]
        said = max((len(ids) for ids in before if common_len(ids, request.ids) == len(ids)), default=0)
        continued += said > 0
        fresh_len = request.prompt_len - said
        assert said == 0 or SMALL.user_len[0] <= fresh_len < SMALL.user_len[1]
        assert SMALL.output_len[0] <= len(request.ids) - request.prompt_len < SMALL.output_len[1]
    turns = SMALL.num_requests / (SMALL.num_requests - continued)
    assert SMALL.mean_turns / 2 < turns < SMALL.mean_turns * 2


def test_trace_repeats() -> None:
    first, second = make_trace(SMALL), make_trace(SMALL)
    assert first.steps == second.steps
    for one, other in zip(first.requests, second.requests, strict=True):
        assert one.prompt_len == other.prompt_len
        np.testing.assert_array_equal(one.ids, other.ids)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_unbounded_caches_find_all_there_is(make: Callable[[int], PrefixIndex], page_size: int, trace: Trace) -> None:
    plan = rehearse(make(page_size), trace, 10**6, keep_found=True)
    assert plan.cached_lens == found_by_comparison(trace, page_size)
    assert sum(plan.evict_lens) == 0
    for number, (found, pages) in enumerate(zip(plan.found, plan.pages, strict=True)):
        assert len(found) == plan.cached_lens[number] // page_size
        np.testing.assert_array_equal(found, pages[: len(found)])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_caches_find_the_same_pages(page_size: int, trace: Trace) -> None:
    first, *others = [rehearse(make(page_size), trace, 10**6, keep_found=True) for make in MAKERS.values()]
    for other in others:
        for ours, theirs in zip(first.found, other.found, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_small_pool_is_kept_to(page_size: int, trace: Trace) -> None:
    index = OurTree(page_size)
    num_pages = 2400 // page_size
    plan = rehearse(index, trace, num_pages)
    assert sum(plan.evict_lens) > 0
    assert plan.num_cached() < sum(found_by_comparison(trace, page_size))
    assert index.size() == plan.size <= num_pages * page_size
    index.tree.check_integrity()


def test_too_small_a_pool_is_an_error(trace: Trace) -> None:
    with pytest.raises(ValueError, match="a pool of 10 pages is too small"):
        rehearse(OurTree(16), trace, 10)


def test_replay_does_the_rehearsed_work(trace: Trace) -> None:
    plan = rehearse(OurTree(16), trace, 150)
    whole = TimedReplay(OurTree(16), trace, plan, 1)
    assert whole.play_piece() > 0
    index = OurTree(16)
    pieces = TimedReplay(index, trace, plan, 3)
    sizes = []
    for _ in range(3):
        assert pieces.play_piece() > 0
        sizes.append(index.size())
    assert 0 < sizes[0] < sizes[-1] == plan.size
    other = Rehearsal(plan.cached_lens, plan.evict_lens, plan.pages, plan.found, plan.size + 16)
    with pytest.raises(RuntimeError, match="in the rehearsal"):
        TimedReplay(OurTree(16), trace, other, 1).play_piece()


class Forgetful(PageHashes):
    """Finds nothing."""

    name = "forgetful"

    def start(self, key: bytes):
        return super().start(b"")

    def end(self, started, key: bytes, value: list[int]) -> int:
        return super().end(started, key, value)


def test_caches_that_disagree_are_not_compared(trace: Trace) -> None:
    with pytest.raises(RuntimeError, match="forgetful finds 0 tokens in the trace at page_size=16, radix_jax "):
        measure_trace({"radix_jax": OurTree, "forgetful": Forgetful}, trace, 16, 1)


def test_rows_have_a_value_of_each_cache(trace: Trace) -> None:
    row, found = measure_trace(MAKERS, trace, 16, 1)
    assert found == sum(found_by_comparison(trace, 16))
    rows = [row, measure_match(MAKERS, 2048, 4, 1), measure_insert(MAKERS, 1), *measure_evictions(MAKERS, [100], 2)]
    for row in rows:
        assert set(row.values) == set(MAKERS)
        assert all(value > 0 for value in row.values.values())
        assert set(row.times_ours) == set(MAKERS)
        assert row.times_ours["radix_jax"] == 1
        assert all(times > 0 for times in row.times_ours.values())
    assert [row.name for row in rows] == [
        "trace per request, P=16",
        "match 2k, 4 edges, P=16",
        "insert 2k under a shared 8k, P=16",
        "evict 64 tokens of 100 leaves, P=1",
    ]


def test_evictions_are_made_up_for() -> None:
    made: list[OurTree] = []

    def make(page_size: int) -> OurTree:
        made.append(OurTree(page_size))
        return made[-1]

    measure_evictions({"radix_jax": make}, [100, 3000], 3)
    snapshots = [index.tree.snapshot() for index in made]
    parents = [{node.parent_id for node in snapshot.nodes} for snapshot in snapshots]
    leaves = [
        sum(node.node_id not in inner for node in snap.nodes) for snap, inner in zip(snapshots, parents, strict=True)
    ]
    assert leaves == [100, 3000]


def test_trie_shares_token_by_token() -> None:
    trie = TokenTrie()
    assert trie.insert([1, 2, 3], [10, 11, 12]) == 0
    assert trie.insert([1, 2, 4, 5], [10, 11, 20, 21]) == 2
    assert trie.num_nodes == 5
    assert trie.match([1, 2, 4, 9]) == (3, [10, 11, 20], 3)
    assert trie.match([7]) == (0, [], 0)


def test_tree_needs_fewer_nodes_visits_and_bytes_than_a_trie(trace: Trace) -> None:
    compared = compare_with_trie(trace, 60)
    assert compared.num_requests == 60
    assert compared.trie_nodes == compared.num_tokens
    assert compared.tree_nodes < 2 * 60, "an insert makes a leaf, and a split at most"
    assert compared.trie_visits == compared.num_found / 60
    assert compared.tree_visits < compared.trie_visits / 10
    assert compared.tree_bytes_per_token < compared.trie_bytes_per_token / 4


def make_ours() -> type[OurTree]:
    return OurTree


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from Linux's /proc")
def test_memory_is_at_least_that_of_the_ids() -> None:
    assert 4 < bytes_per_token(make_ours, 512) < 8


def test_table_compares_with_ours() -> None:
    report = Report(
        benchmark="radix_tree",
        machine=Machine("a processor", 2, "3.11.7", {"numpy": "2.4.6"}),
        rows=[
            Row("match 8k, 1 edge, P=16", "µs", {"radix_jax": 2.0, "page hashes": 500.0}, {"page hashes": 240.0}),
            plain_row("evict 64 tokens of 1,000 leaves, P=1", "µs", {"radix_jax": 10.0}),
        ],
        found={1: 12345, 16: 12000},
        trie=TrieComparison(128, 1000, 500, 1000, 20, 4.0, 1.5, 300.0, 9.0),
    )
    lines = as_table(report).splitlines()
    assert lines[:4] == [
        "| | unit | radix_jax | page hashes |",
        "|---|---|---|---|",
        "| match 8k, 1 edge, P=16 | µs | 2.0 | 500 (240.0x) |",
        "| evict 64 tokens of 1,000 leaves, P=1 | µs | 10.0 | - |",
    ]
    assert "12,345 at P=1, 12,000 at P=16" in lines[7]
    assert "| nodes | 1,000 | 20 |" in lines
    assert lines[-1] == "a processor, 2 processors, Python 3.11.7, numpy 2.4.6"


def test_a_slow_turn_of_all_counts_for_neither_figure_nor_quotient() -> None:
    """Two caches whose clocks stand still but for what they add: the second takes three times as long."""
    samples = {"radix_jax": iter([1.0, 1.0, 50.0, 1.0, 1.0]), "other": iter([3.0, 3.0, 150.0, 3.0, 90.0])}
    order: list[str] = []

    def take(name: str) -> float:
        order.append(name)
        return next(samples[name])

    taken = in_turn({name: partial(take, name) for name in samples}, 5)
    row = median_row("row", taken)
    assert row.values == {"radix_jax": 1e6, "other": 3e6}
    assert row.times_ours == {"radix_jax": 1, "other": 3}
    assert order[:4] == ["radix_jax", "other", "other", "radix_jax"], "each turn begins with another"


PLOTTED = [
    Row(
        "match 8k", "µs", {"radix_jax": 2.0, "page hashes": 500.0, "resumed": 1.5}, {"page hashes": 250, "resumed": 0.7}
    ),
    plain_row("memory", "bytes", {"radix_jax": 4.9, "page hashes": 15.0}),
]


def test_a_plot_has_all_rows_and_caches(tmp_path: Path) -> None:
    plot_rows(PLOTTED, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    plot_rows(PLOTTED, tmp_path / "plot.svg")
    drawn = re.findall(r"<!-- (.*?) -->", (tmp_path / "plot.svg").read_text(encoding="utf-8"))
    assert {"250.0x", "0.7x", "3.1x", "match 8k", "ours: 2.0 µs", "memory", "page hashes", "resumed"} <= set(drawn)


def test_a_plot_that_cannot_be_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(name: str) -> str:
        with pytest.raises(SystemExit):
            parse_arguments(["--plot", str(tmp_path / name)])
        return capsys.readouterr().err

    assert "a plot is .svg or .png, not '.jpg'" in refusal("plot.jpg")
    assert "there is no folder" in refusal("missing/plot.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "plots need matplotlib; pip install 'radix_jax[plots]'" in refusal("plot.svg")


def test_the_command_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], str]] = []
    monkeypatch.setattr("os.execve", lambda _, command, env: started.append((command, env["OMP_NUM_THREADS"])))
    monkeypatch.setattr("sys.argv", ["radix_tree", "--json"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    restart_on_one_thread()
    assert started == [([sys.executable, "-m", "benchmarks.radix_tree", "--json"], "1")]
    for name, number in ONE_THREAD.items():
        monkeypatch.setenv(name, number)
    restart_on_one_thread()
    assert len(started) == 1, "it restarts once"


@pytest.mark.slow
def test_one_json_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--json", "--requests", "60", "--leaves", "50,100", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", ["radix_tree", *arguments])
    main()
    (line,) = capsys.readouterr().out.splitlines()
    parsed = json.loads(line)
    names = [row["name"] for row in parsed["rows"]]
    assert names[:7] == [
        "match 8k, 1 edge, P=16",
        "match 128k, 16 edges, P=16",
        "insert 2k under a shared 8k, P=16",
        "trace per request, P=1",
        "trace per request, P=16",
        "evict 64 tokens of 50 leaves, P=1",
        "evict 64 tokens of 100 leaves, P=1",
    ]
    assert all(row["values"]["radix_jax"] > 0 for row in parsed["rows"])
    assert parsed["found"]["1"] >= parsed["found"]["16"] > 0
    assert parsed["trie"]["num_requests"] == 60


def test_modules_of_a_wheel_are_taken_and_others_stood_in_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sglang" / "srt" / "mem_cache"
    folder.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('the package itself is not run')")
    (folder / "radix_cache.py").write_text(
        "from sglang.srt.mem_cache.allocator import Allocator\n"
        "import sglang.srt.deep.er as deeper\n"
        "class RadixCache(Allocator):\n"
        "    answer = deeper.anything.at_all(1)[2]\n"
    )
    (tmp_path / "sglang-1.2.3.dist-info").mkdir()
    finder = FolderFinder(tmp_path)
    monkeypatch.setattr("sys.meta_path", [finder, *sys.meta_path])
    try:
        module = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        assert module.RadixCache.answer is StandIn
        assert issubclass(module.RadixCache, StandIn)
        with pytest.raises(ImportError, match=r"no .*events\.py or \.so; unpack a wheel of sglang"):
            importlib.import_module("sglang.srt.mem_cache.events")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
    assert sglang_version(tmp_path) == "1.2.3"
