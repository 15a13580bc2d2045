"""Text drawings of snapshots made by hand and by trees."""

import numpy as np
import pytest

from radix_jax.cache import RadixTree
from radix_jax.viz import NodeSnapshot, TailSnapshot, TreeSnapshot, render_text


def node(node_id: int, parent_id: int | None, depth: int, token_ids: list[int], **facts) -> NodeSnapshot:
    """A snapshot node at page size 1; unlocked and without hits unless told."""
    defaults = {"num_locks": 0, "num_pins": 0, "num_hits": 0, "namespace": None, "state": "evictable"}
    if parent_id is None:
        defaults["state"] = "root"
    ids = np.array(token_ids, np.int32)
    return NodeSnapshot(node_id, parent_id, depth, ids, ids, **(defaults | facts))


def chain(length: int) -> TreeSnapshot:
    """A root and `length` nodes of one token under each other."""
    below = [node(number, number - 1, number, [number]) for number in range(1, length + 1)]
    return TreeSnapshot(page_size=1, nodes=(node(0, None, 0, []), *below))


def test_drawing_of_a_small_tree():
    snapshot = TreeSnapshot(
        page_size=1,
        nodes=(
            node(0, None, 0, []),
            node(1, 0, 1, [101, 11], num_locks=2, num_hits=3, state="locked"),
            node(2, 1, 2, [12, 13], num_locks=1, num_hits=1, state="locked"),
            node(3, 1, 2, [99]),
            node(4, 0, 1, [7]),
        ),
    )
    assert render_text(snapshot).splitlines() == [
        "radix tree · page size 1 · 4 nodes · 6 tokens (4 locked, 2 evictable)",
        "root",
        "├─ 101 11 · 2 tokens · 2 pages · 2 locks · 3 hits",
        "│  ├─ 12 13 · 2 tokens · 2 pages · 1 lock · 1 hit",
        "│  └─ 99 · 1 token · 1 page · 0 locks · 0 hits",
        "└─ 7 · 1 token · 1 page · 0 locks · 0 hits",
    ]


def tail(parent_id: int | None, token_ids: list[int], page_id: int, num_locks: int = 0) -> TailSnapshot:
    return TailSnapshot(parent_id, np.array(token_ids, np.int32), page_id, num_locks)


def test_pins_and_tails_are_told_of_where_there_are_any():
    snapshot = TreeSnapshot(
        page_size=4,
        nodes=(
            node(0, None, 0, []),
            node(1, 0, 1, [1, 2, 3, 4], num_locks=1, num_pins=2, state="locked"),
            node(2, 1, 2, [5, 6, 7, 8], num_pins=1, state="pinned"),
        ),
        tails=(tail(1, [5, 6], 9), tail(None, [7], 12), tail(1, [8], 11, num_locks=1)),
    )
    assert render_text(snapshot).splitlines() == [
        "radix tree · page size 4 · 2 nodes · 8 tokens (4 locked, 4 evictable) · 8 pinned · 3 tails of 4 tokens",
        "root",
        "└─ 1 2 3 4 · 4 tokens · 4 pages · 1 lock · 0 hits · 2 pins",
        "   ├─ 5 6 7 8 · 4 tokens · 4 pages · 0 locks · 0 hits · 1 pin",
        "   └─ 2 tails: 5 6 (page 9), 8 (page 11, 1 lock)",
        "lost tail: 7 (page 12)",
    ]
    decoded = render_text(snapshot, lambda ids: "".join(map(chr, ids)))
    assert r"2 tails: '\x05\x06' (page 9), '\x08' (page 11, 1 lock)" in decoded


def test_many_tails_take_one_line():
    tails = tuple(tail(0, [number], number) for number in range(10_000))
    decoded: list[int] = []

    def decode(ids) -> str:
        decoded.append(len(ids))
        return f"{ids[0]}"

    lines = render_text(TreeSnapshot(4, (node(0, None, 0, []),), tails), decode).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("└─ 10,000 tails: '0' (page 0), '1' (page 1), ")
    assert lines[2].endswith("…")
    assert len(lines[2]) <= 100
    assert len(decoded) < 20, "only what is shown is decoded"


def test_an_empty_tree_is_a_header():
    drawn = RadixTree(page_size=16).render()
    assert drawn == "radix tree · page size 16 · 0 nodes · 0 tokens (0 locked, 0 evictable)"


def test_tokens_are_decoded_escaped_and_cut_to_the_width():
    snapshot = TreeSnapshot(page_size=1, nodes=(node(0, None, 0, []), node(1, 0, 1, [72, 233, 10] * 100)))
    decoded: list[int] = []

    def decode(ids) -> str:
        decoded.append(len(ids))
        return "".join(map(chr, ids))

    line = render_text(snapshot, decode, width=80).splitlines()[2]
    assert line.startswith(r"└─ 'Hé\nHé\nHé")
    assert "… · 300 tokens · 300 pages" in line
    assert len(line) == 80
    assert max(decoded) < 80, "a long node is not decoded as a whole"


def test_namespaces_have_a_root_each():
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1], [1])
    tree.insert_prefix([1], [2], namespace=("tenant", 7))
    lines = tree.render().splitlines()
    assert [line for line in lines if "token" not in line] == ["root", "namespace ('tenant', 7)"]


def test_large_trees_are_summed_up_not_dumped():
    tree = RadixTree(page_size=1)
    for first in range(1_000):
        tree.insert_prefix([first, 1, 2], range(3 * first, 3 * first + 3))
    tree.insert_prefix([5_000] * 40, range(3_000, 3_040))
    lines = render_text(tree.snapshot(), max_nodes=11).splitlines()
    assert len(lines) == 13
    assert lines[0].startswith("radix tree · page size 1 · 1,001 nodes · 3,040 tokens")
    assert any("40 tokens" in line for line in lines), "what holds most tokens is drawn first"
    assert lines[-1] == "└─ … 991 more children, 2,973 tokens"


def test_hidden_subtrees_count_in_full():
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1, 2], [1, 2])
    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    tree.insert_prefix([1, 2, 3, 4], [1, 2, 3, 4])
    assert render_text(tree.snapshot(), max_nodes=2).splitlines()[-1] == "   └─ … 1 more child, 2 tokens"
    for number in range(5):
        tree.insert_prefix([1], [90 + number], namespace=number)
    assert render_text(tree.snapshot(), max_nodes=1).splitlines()[-1] == "… 5 more namespaces, 5 tokens"


@pytest.mark.parametrize("width", [80, 100, 140])
def test_deep_trees_stay_inside_the_width(width: int):
    lines = render_text(chain(2_000), max_nodes=100, width=width).splitlines()
    assert max(map(len, lines[1:])) <= width
    num_drawn = sum(" · 1 token · " in line for line in lines)
    assert num_drawn == (width - 56) // 3
    assert lines[-1].endswith(f"… 1 more child, {2_000 - num_drawn:,} tokens")


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="max_nodes=0"):
        render_text(chain(1), max_nodes=0)
    with pytest.raises(ValueError, match="width=79"):
        render_text(chain(1), width=79)
