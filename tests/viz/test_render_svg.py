"""SVG drawings: well-formed, complete, bounded, without overlaps, and proof against what is in the tokens."""

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_jax.cache import PagePool, PrefixCache, RadixTree
from radix_jax.viz import NodeSnapshot, TailSnapshot, TreeSnapshot, TreeView, render_svg, render_text
from radix_jax.viz.boxes import box_width
from radix_jax.viz.layout import place
from radix_jax.viz.outline import Outline

SVG = "{http://www.w3.org/2000/svg}"


def snapshot_of(parents: list[int | None], token_ids: list[list[int]], **facts) -> TreeSnapshot:
    """Nodes 0, 1, ... with the parents given, at page size 1; roots are those without one."""
    depths: list[int] = []
    nodes = []
    for number, (parent, ids) in enumerate(zip(parents, token_ids, strict=True)):
        depths.append(0 if parent is None else depths[parent] + 1)
        defaults = {
            "num_locks": 0,
            "num_pins": 0,
            "num_hits": 0,
            "namespace": None,
            "state": "root" if parent is None else "evictable",
        }
        tokens = np.array(ids, np.int32)
        nodes.append(NodeSnapshot(number, parent, depths[-1], tokens, tokens, **(defaults | facts)))
    return TreeSnapshot(page_size=1, nodes=tuple(nodes))


def texts(svg: str) -> list[str]:
    """All lines of text that are seen, in order."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def hovers(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def textbook_tree() -> RadixTree:
    tree = RadixTree(page_size=1)
    tree.insert_prefix([101, 11, 12, 21, 22], [1, 2, 3, 4, 5])
    tree.insert_prefix([101, 11, 12, 31, 32], [11, 12, 13, 14, 15])
    tree.lock(tree.match_prefix([101, 11, 12]).handle)
    return tree


def test_a_drawing_tells_all_facts_of_each_node():
    svg = render_svg(textbook_tree().snapshot())
    lines = texts(svg)
    assert lines[:3] == ["Radix tree", "page size 1 · 3 nodes · 7 tokens (3 locked, 4 evictable)", "root"]
    assert lines[3:10] == [
        "101 11 12",
        "3 tokens · pages 1–3 · 1 hit",
        "1",
        "21 22",
        "2 tokens · pages 4–5 · 0 hits",
        "31 32",
        "2 tokens · pages 14–15 · 0 hits",
    ]
    assert lines[10:] == ["locked, and how often", "evictable, leaves first", "the thicker, the more tokens"]
    assert hovers(svg)[1:3] == [
        "locked by 1; 3 tokens: 101 11 12; pages 1–3; 1 hit",
        "evictable; 2 tokens: 21 22; pages 4–5; 0 hits",
    ]


def test_states_differ_in_more_than_colour():
    root = ElementTree.fromstring(render_svg(textbook_tree().snapshot()))
    boxes = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    states = []
    for box in boxes:
        rect = box.find(f"{SVG}rect")
        assert rect is not None
        padlocks = [element for element in box.iter() if element.get("class") == "rj-padlock"]
        states.append((rect.get("class"), len(padlocks)))
    assert states == [("rj-plain", 0), ("rj-locked", 1), ("rj-evictable", 0), ("rj-evictable", 0)]
    style = root.findtext(f"{SVG}style") or ""
    assert re.search(r"\.rj-locked\{stroke-width:2\.5\}", style)
    assert re.search(r"\.rj-hidden\{stroke-dasharray", style)


def tailed_cache() -> PrefixCache:
    """Pages of four tokens; a locked and pinned node, a pinned one, a tail under each, one of them locked."""
    cache = PrefixCache(RadixTree(page_size=4, max_pinned_tokens=100), PagePool(100))
    for first in (10, 20, 30):
        match = cache.match_prefix([])
        cache.lock(match.handle)
        ids = list(range(first, first + 6))
        done = cache.commit(ids, cache.allocate(2), match.handle)
        cache.release(done.handle, done.pages, ids)
    for first in (10, 20):
        cache.tree.pin(range(first, first + 4), ttl=9)
    match = cache.match_prefix(range(10, 16))
    assert match.donor_handle is not None
    cache.lock(match.handle)
    cache.lock(match.donor_handle)
    return cache


def test_pins_and_tails_are_drawn_and_explained():
    svg = render_svg(tailed_cache().snapshot())
    lines = texts(svg)
    assert lines[1] == "page size 4 · 3 nodes · 12 tokens (4 locked, 8 evictable) · 8 pinned · 3 tails of 6 tokens"
    assert "tail: 14 15 (page 2, 1 lock)" in lines
    assert "tail: 24 25 (page 4)" in lines
    assert lines[-5:] == [
        "locked, and how often",
        "pinned: evicted last",
        "evictable, leaves first",
        "the thicker, the more tokens",
        "tail: a page filled in part",
    ]
    words = hovers(svg)
    assert "locked by 1, pinned by 1; 4 tokens: 10 11 12 13; page" in words[1]
    assert "pinned by 1; 4 tokens: 20 21 22 23" in " ".join(words)
    assert "evictable; 4 tokens: 30 31 32 33" in " ".join(words)
    assert "pages filled in part, the ends of requests, to copy from; tail: 24 25 (page 4)" in words
    boxes = [group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    signs = [[element.get("class") for element in box if "rj-p" in (element.get("class") or "")] for box in boxes]
    assert [[sign for sign in found if sign in ("rj-padlock", "rj-pin")] for found in signs] == [
        [],
        ["rj-padlock", "rj-pin"],
        ["rj-padlock"],
        ["rj-pin"],
        [],
        [],
        [],
    ]
    classes = [rect.get("class") for box in boxes for rect in box.findall(f"{SVG}rect")[:1]]
    assert classes == [
        "rj-plain",
        "rj-locked",
        "rj-locked rj-tail",
        "rj-pinned",
        "rj-evictable rj-tail",
        "rj-evictable",
        "rj-evictable rj-tail",
    ]


def test_lost_tails_are_named_so():
    cache = tailed_cache()
    cache.free(cache.tree.evict(8))
    svg = render_svg(cache.snapshot())
    assert "2 lost tails: 34 35 (page 6), 24 25 (page 4)" in texts(svg)
    assert any("their prefixes were evicted" in hover for hover in hovers(svg))


def test_many_tails_are_one_box():
    tails = tuple(TailSnapshot(0, np.array([number], np.int32), number, 0) for number in range(20_000))
    svg = render_svg(TreeSnapshot(4, snapshot_of([None], [[]]).nodes, tails), lambda ids: '<&"\U0001f600' * len(ids))
    assert len(svg.encode()) < 10_000
    assert any(line.startswith("20,000 tails: ") and line.endswith("…") for line in texts(svg))


def test_colours_follow_the_readers_theme_and_texts_stand_out():
    style = ElementTree.fromstring(render_svg(textbook_tree().snapshot())).findtext(f"{SVG}style") or ""
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for sheet in (light, dark):
        fills = dict(re.findall(r"(\S+)\{fill:(#\w+)\}", sheet.replace(".rj-tree ", "")))
        for paper in (".rj-paper", ".rj-locked", ".rj-pinned", ".rj-evictable", ".rj-plain", ".rj-hidden"):
            for ink in ("text", ".rj-faint"):
                assert contrast(fills[ink], fills[paper]) >= 4.5, (ink, paper)
        assert contrast(fills[".rj-locks"], fills[".rj-locked"]) >= 4.5
        for paper in (".rj-locked", ".rj-pinned"):
            assert contrast(fills[".rj-pins"], fills[paper]) >= 4.5
        assert contrast(fills[".rj-inverse"], fills[".rj-badge"]) >= 4.5
        assert contrast(fills[".rj-inverse"], fills[".rj-private"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2, from 1 to 21."""

    def luminance(colour: str) -> float:
        channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


HOSTILE = [
    "</text></svg><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "<![CDATA[ ]]> & &lt; <!-- -->",
    "\x00\x1b[31m\r\n\t\x7f",
    "\u202egnirts\u2066",
    "\ud800\ufffe\uffff",
]


@pytest.mark.parametrize("payload", HOSTILE)
def test_nothing_in_tokens_or_namespaces_becomes_markup(payload: str):
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1], [1])
    plain = render_svg(tree.snapshot(), lambda ids: "x")
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1], [1], namespace=payload)
    svg = render_svg(tree.snapshot(), lambda ids: payload)
    tags = [element.tag for element in ElementTree.fromstring(svg).iter()]
    assert tags == [element.tag for element in ElementTree.fromstring(plain).iter()]
    svg.encode("utf-8")
    assert all(char.isprintable() or char == "\n" for char in svg)
    assert texts(svg)[3][:20] == repr(payload)[:20]
    html = TreeView(tree.snapshot(), lambda ids: payload)._repr_html_()
    assert "<script" not in html
    assert "<img" not in html


def test_a_namespace_with_a_wild_repr_is_escaped():
    class Wild:
        def __repr__(self) -> str:
            return "<b>\n\x00</b>"

    svg = render_svg(snapshot_of([None, 0], [[], [1]], namespace=Wild()))
    assert r"namespace <b>\n\x00</b>" in texts(svg)


def test_tokens_are_decoded_and_cut_by_columns():
    snapshot = snapshot_of([None, 0, 0], [[], [26085] * 60, [97, 98]])
    labels = texts(render_svg(snapshot, lambda ids: "".join(map(chr, ids))))
    assert f"'{'日' * 13}…" in labels
    assert "'ab'" in labels
    assert "60 tokens · 60 pages · 0 hits" in labels, "page ids that don't fit are counted"


def test_empty_trees_and_bounds_out_of_range():
    empty = RadixTree(page_size=16).snapshot()
    assert texts(render_svg(empty))[:3] == [
        "Radix tree",
        "page size 16 · 0 nodes · 0 tokens (0 locked, 0 evictable)",
        "nothing is cached",
    ]
    with pytest.raises(ValueError, match="max_nodes=0"):
        render_svg(empty, max_nodes=0)
    with pytest.raises(ValueError, match="max_depth=0"):
        render_svg(empty, max_depth=0)


def test_the_same_tree_gives_the_same_bytes():
    assert render_svg(textbook_tree().snapshot()) == render_svg(textbook_tree().snapshot())


def test_nothing_is_fetched_and_nothing_runs():
    svg = render_svg(textbook_tree().snapshot())
    assert re.findall(r"https?://[^\s\"']+", svg) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"url\(|@import|href|<script|<image|<foreignObject| on\w+=", svg)


@pytest.mark.parametrize("kind", ["wide", "bushy", "deep", "namespaces", "long"])
def test_size_is_bounded_whatever_the_tree(kind: str):
    num_nodes = 20_000
    parents: list[int | None] = {
        "wide": [None] + [0] * num_nodes,
        "bushy": [None] + [(number - 1) // 3 for number in range(1, num_nodes)],
        "deep": [None, *range(num_nodes)],
        "namespaces": [None] * num_nodes,
        "long": [None, 0],
    }[kind]
    length = 1_000_000 if kind == "long" else 1
    snapshot = snapshot_of(parents, [[] if parent is None else [7] * length for parent in parents])
    svg = render_svg(snapshot, lambda ids: '<&"\U0001f600' * len(ids))
    assert len(svg.encode()) < 200_000
    num_drawn = len(hovers(svg)) - sum(hover.startswith("left out") for hover in hovers(svg))
    assert num_drawn <= 40
    num_hidden = sum(parent is not None for parent in parents) - sum("; pages " in hover for hover in hovers(svg))
    if num_hidden:
        assert texts(svg)[-1] == f"left out: {num_hidden:,} nodes"


def test_what_is_left_out_adds_up():
    tree = RadixTree(page_size=1)
    for first in range(40):
        for second in range(first + 1):
            tree.insert_prefix([first, second, 7], range(3_000 * first + 3 * second, 3_000 * first + 3 * second + 3))
    tree.lock(tree.match_prefix([0, 0, 7]).handle)
    snapshot = tree.snapshot()
    svg = render_svg(snapshot, max_nodes=15)
    drawn = sum(int(number) for number in re.findall(r"(?:evictable|locked by 1); (\d+) token", svg))
    hidden = [re.search(r"in all ([\d,]+) nodes? and ([\d,]+) tokens?, ([\d,]+)", hover) for hover in hovers(svg)]
    sums = np.sum([[int(number.replace(",", "")) for number in found.groups()] for found in hidden if found], axis=0)
    num_nodes = sum(node.state != "root" for node in snapshot.nodes)
    assert drawn + sums[1] == snapshot.num_tokens
    assert sums[0] == num_nodes - 14
    assert sums[2] == 3
    assert any("rj-padlock" in line for line in svg.split("more nodes")[1:]), "a hidden lock shows"


def test_a_wide_level_leaves_room_for_what_is_below_it():
    parents: list[int | None] = [None] + [0] * 50 + [1] * 3
    token_ids = [[] if parent is None else [number] * (60 - number) for number, parent in enumerate(parents)]
    snapshot = snapshot_of(parents, token_ids)

    def shown(max_nodes: int) -> set[int]:
        return {int(number) for number in re.findall(r"tokens: (\d+) ", render_svg(snapshot, max_nodes=max_nodes))}

    assert shown(10) == {1, 2, 3, 4, 5, 6, 51, 52, 53}
    assert shown(12) == {*range(1, 9), 51, 52, 53}, "the room that is left goes to the next children"


@given(
    shape=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.booleans()), max_size=30),
    max_nodes=st.integers(1, 40),
    max_depth=st.integers(1, 8),
    num_between=st.integers(1, 5),
)
def test_boxes_never_overlap_and_texts_fit(
    shape: list[tuple[int, int, bool]], max_nodes: int, max_depth: int, num_between: int
):
    parents: list[int | None] = [None]
    for place_of_parent, _, is_root in shape:
        parents.append(None if is_root else place_of_parent % len(parents))
    order = depth_first(parents)
    lengths = [0, *(length for _, length, _ in shape)]
    snapshot = snapshot_of(
        [None if parents[old] is None else order.index(parents[old]) for old in order],
        [[] if parents[old] is None else [12345] * lengths[old] for old in order],
    )
    tails = [number for number in range(-1, len(order)) if number % num_between == 0]
    snapshot = replace(
        snapshot, tails=tuple(TailSnapshot(number, np.arange(9, dtype=np.int32), 1, 1) for number in tails)
    )
    outline = Outline(snapshot, max_nodes, max_depth)
    boxes = place(outline, lambda box: box_width(box, None))
    for box in boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.width >= box_width(box, None)
        if box.parent is not None:
            parent = boxes[box.parent]
            assert parent.x + parent.width < box.x
    for column in {box.x for box in boxes}:
        stacked = sorted((box for box in boxes if box.x == column), key=lambda box: box.y)
        assert all(upper.bottom + 8 <= lower.y for upper, lower in pairwise(stacked))
    drawn = ElementTree.fromstring(render_svg(snapshot, max_nodes=max_nodes, max_depth=max_depth))
    width = float(drawn.get("width") or 0)
    assert width >= max((box.x + box.width for box in boxes), default=0)
    legend = drawn.findall(f"./{SVG}g/{SVG}g")[-1]
    assert all(float(line.get("x") or 0) + 6 * len(line.text or "") < width for line in legend.iter(f"{SVG}text"))


def depth_first(parents: list[int | None]) -> list[int]:
    children: dict[int | None, list[int]] = {}
    for number, parent in enumerate(parents):
        children.setdefault(parent, []).append(number)
    order, stack = [], list(children[None])
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(children.get(node, ()))
    return order


def test_notebooks_and_terminals_show_a_view_in_their_own_way():
    tree = textbook_tree()
    view = TreeView(tree.snapshot(), lambda ids: "-".join(map(str, ids)))
    assert repr(view) == render_text(tree.snapshot(), lambda ids: "-".join(map(str, ids)))
    assert "101-11-12" in view._repr_html_()
    html = tree._repr_html_()
    assert render_svg(tree.snapshot()) in html
    assert ElementTree.fromstring(html).tag == "div"
