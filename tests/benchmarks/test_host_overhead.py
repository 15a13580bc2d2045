"""The benchmark of the host's work counts what it says; its times are nobody's business here."""

import json

import pytest

from benchmarks import host_overhead
from benchmarks.host_overhead import Case, as_table, cases, fill, measure, run
from radix_jax.cache import PagePool, PrefixCache, RadixTree

TINY = Case(num_rows=3, num_spare_pages=5, num_nodes=4)


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        Case(num_rows=2, page_size=64, num_spare_pages=0, num_nodes=8),  # each new page is evicted
        Case(num_rows=2, num_spare_pages=50, num_nodes=0, sampled=True, overlap=False, num_waiting=2),
    ],
)
def test_every_step_is_a_decode_step_of_all_rows(case: Case) -> None:
    measured = measure(case, num_steps=40)
    assert (measured.case, measured.num_steps) == (case, 40)
    assert min(measured.plan_us, measured.pack_us, measured.put_us, measured.commit_us) > 0
    assert measured.python_us > max(measured.plan_us, measured.pack_us, measured.commit_us)


def test_pages_of_the_pool() -> None:
    # 512 tokens of a prompt and 3 + 8 of output are 33 pages of 16; page 0 is nobody's.
    assert measure(TINY, num_steps=3).num_pages == 1 + 3 * 33 + 4 + 5


@pytest.mark.parametrize("num_nodes", [0, 1, 1001, 2500])
def test_nodes_of_the_tree(num_nodes: int) -> None:
    cache = PrefixCache(RadixTree(page_size=4), PagePool(num_nodes + 2))
    fill(cache, num_nodes)
    cache.check_integrity()
    assert sum(len(node.token_ids) > 0 for node in cache.snapshot().nodes) == num_nodes  # all but the root
    assert cache.num_evictable == num_nodes


def test_more_steps_than_the_context_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="4000 steps after 512 tokens exceed 4096"):
        measure(TINY, num_steps=4000)


def test_json_is_one_line_and_the_table_has_a_row_a_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_overhead, "cases", lambda: [TINY])
    monkeypatch.setattr("sys.argv", ["host_overhead", "--json", "--steps", "3"])
    host_overhead.main()
    (line,) = capsys.readouterr().out.splitlines()
    [measured] = json.loads(line)["measurements"]
    assert (measured["case"]["num_rows"], measured["num_steps"]) == (3, 3)
    table = as_table(run([TINY, TINY], 3))
    assert table.count("| 3 | 16 | 109 | 4 | greedy | on | 0 |") == 2


def test_the_usual_cases_hold_every_pool_and_tree_at_64_rows() -> None:
    found = {(case.num_rows, case.page_size, case.num_spare_pages, case.num_nodes) for case in cases()}
    assert found >= {
        (64, size, spare, nodes) for size in (1, 16) for spare in (1000, 100_000) for nodes in (100, 100_000)
    }
    assert {case.num_rows for case in cases()} == {1, 8, 32, 64}
