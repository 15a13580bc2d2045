"""Replays: what changed from frame to frame, the column of drawings, and the page."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from radix_jax.cache import PagePool, PrefixCache, RadixTree
from radix_jax.viz import PoolSnapshot, Replay
from radix_jax.viz.changes import find_changes
from radix_jax.viz.replay_page import page

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def three_frames(decode=None) -> Replay:
    tree = RadixTree(page_size=1)
    replay = Replay(decode)
    replay.add("Nothing", tree.snapshot())
    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    replay.add("Insert", tree.snapshot(), "One edge.")
    tree.lock(tree.match_prefix([1, 2]).handle)
    replay.add("Match and lock", tree.snapshot(), "", PoolSnapshot(6, np.array([5], np.int32)))
    return replay


def test_changes_name_what_happened_to_each_node():
    tree = RadixTree(page_size=1)
    snapshots = [tree.snapshot()]

    def badges() -> tuple[list[str], str]:
        snapshots.append(tree.snapshot())
        changes = find_changes(*snapshots[-2:])
        return [changes.badges.get(node.node_id, "") for node in snapshots[-1].nodes], changes.summary

    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    assert badges() == (["", "new"], "change: +3 tokens (pages 1–3)")
    tree.insert_prefix([1, 2, 9], [1, 2, 9])
    assert badges() == (["", "split", "split", "new"], "change: +1 token (page 9)")
    handle = tree.match_prefix([1, 2, 9]).handle
    assert badges() == (["", "hit", "", "hit"], "")
    tree.lock(handle)
    assert badges() == (["", "locked", "", "locked"], "change: +3 locked")
    second = tree.match_prefix([1, 2, 3]).handle
    tree.lock(second)
    assert badges() == (["", "hit, +1 lock", "hit, locked", ""], "change: +1 locked")
    tree.unlock(second)
    assert badges() == (["", "−1 lock", "unlocked", ""], "change: −1 locked")
    assert tree.evict(1).tolist() == [3]
    assert badges() == (["", "", ""], "change: −1 token (page 3)")
    tree.unlock(handle)
    assert badges() == (["", "unlocked", "unlocked"], "change: −3 locked")
    assert badges() == (["", "", ""], "")


def test_changes_count_pages_of_any_size():
    tree = RadixTree(page_size=4)
    before = tree.snapshot()
    tree.insert_prefix(range(12), [5, 6, 9])
    assert find_changes(before, tree.snapshot()).summary == "change: +12 tokens (pages 5–6 9)"


def test_changes_name_pins_and_tails():
    cache = PrefixCache(RadixTree(page_size=4, max_pinned_tokens=8), PagePool(17))
    snapshots = [cache.snapshot()]

    def changes() -> tuple[list[str], str]:
        snapshots.append(cache.snapshot())
        found = find_changes(*snapshots[-2:])
        return [found.badges.get(node.node_id, "") for node in snapshots[-1].nodes], found.summary

    def serve(ids: list[int]) -> None:
        match = cache.match_prefix([])
        cache.lock(match.handle)
        done = cache.commit(ids, cache.allocate(2), match.handle)
        cache.release(done.handle, done.pages, ids)

    serve([1, 2, 3, 4, 5])
    assert changes() == (["", "new"], "change: +4 tokens (page 1) · +1 tail (page 2)")
    first = cache.tree.pin([1, 2, 3, 4], ttl=1)
    assert changes() == (["", "pinned"], "change: +4 pinned")
    second = cache.tree.pin([1, 2, 3, 4], ttl=1)
    assert changes() == (["", "+1 pin"], "")
    cache.tree.unpin(first)
    cache.tree.unpin(second)
    assert changes() == (["", "unpinned"], "change: −4 pinned")
    donor = cache.match_prefix([1, 2, 3, 4, 5]).donor_handle
    assert donor is not None
    cache.lock(donor)
    assert changes() == (["", "hit"], "change: +1 tail locked")
    cache.unlock(donor)
    serve([1, 2, 3, 4, 5, 6])
    assert changes() == (["", ""], "change: +1 tail (page 4) · −1 tail (page 2) · −1 tail locked")


def test_pool_shows_pinned_pages_and_tails():
    cache = PrefixCache(RadixTree(page_size=2, max_pinned_tokens=8), PagePool(17))
    match = cache.match_prefix([])
    cache.lock(match.handle)
    done = cache.commit([1, 2, 3, 4, 5], cache.allocate(3), match.handle)
    cache.release(done.handle, done.pages, [1, 2, 3, 4, 5])
    cache.tree.pin([1, 2], ttl=1)
    replay = Replay()
    replay.add("Pin", cache.snapshot(), pool=PoolSnapshot(17, np.empty(0, np.int32)))
    svg = replay.render_svg()
    assert {"0 locked", "1 pinned", "2 evictable", "0 private", "13 free"} <= set(texts(svg))
    cells = [rect.get("class") for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.get("width") == "25"]
    assert cells[:4] == ["rj-pinned", "rj-evictable", "rj-evictable", "rj-hidden"]


def test_column_of_drawings_has_every_frame_in_order():
    svg = three_frames().render_svg()
    lines = texts(svg)
    titles = [line for line in lines if re.match(r"\d\. ", line)]
    assert titles == ["1. Nothing", "2. Insert", "3. Match and lock"]
    assert "One edge." in lines
    assert {"new", "split, locked"} & set(lines) == {"new"}
    assert [line for line in lines if line.startswith("change")] == [
        "change: +3 tokens (pages 1–3)",
        "change: +2 locked",
    ]
    papers = [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.get("class") == "rj-paper"]
    assert len({paper.get("width") for paper in papers}) == 1
    tops = [int(top) for top in re.findall(r'<g transform="translate\(0 (\d+)\)">\n<rect class="rj-paper"', svg)]
    ends = [top + float(paper.get("height") or 0) for top, paper in zip(tops, papers, strict=True)]
    assert all(end < top for end, top in zip(ends, tops[1:], strict=False))
    assert ends[-1] <= int(ElementTree.fromstring(svg).get("height") or 0)


def test_pool_shows_the_owner_of_each_page():
    lines = texts(three_frames().render_svg())
    start = lines.index("Pool of 5 pages")
    assert lines[start + 1 : start + 10] == ["2 locked", "1 evictable", "1 private", "1 free", *"12345"]
    root = ElementTree.fromstring(three_frames().render_svg())
    cells = [rect.get("class") for rect in root.iter(f"{SVG}rect") if rect.get("width") == "25"]
    assert cells == ["rj-locked", "rj-locked", "rj-evictable", "rj-hidden", "rj-private"]


def test_large_pools_are_counted_not_drawn():
    tree = RadixTree(page_size=1)
    tree.insert_prefix(range(500), range(1, 501))
    replay = Replay()
    replay.add("Full", tree.snapshot(), pool=PoolSnapshot(100_001, np.arange(600, 700, dtype=np.int32)))
    svg = replay.render_svg()
    assert {"Pool of 100,000 pages", "500 evictable", "100 private", "99,400 free"} <= set(texts(svg))
    assert len(svg) < 10_000


class Structure(HTMLParser):
    """Ids, tags and text of a page, by the rules of HTML."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_page_lists_all_steps_without_scripts_and_needs_nothing_else():
    document = three_frames().render_html("A & B")
    structure = Structure(document)
    assert structure.ids == ["step-1", "step-2", "step-3"]
    assert structure.links == ["#step-1", "#step-2", "#step-3"]
    assert structure.words.count("A & B") == 2
    assert structure.tags.count("svg") == 3
    assert (structure.tags.count("script"), structure.tags.count("style")) == (1, 1)
    assert not {"link", "img", "iframe", "object", "image", "use", "foreignobject"} & set(structure.tags)
    assert not any(name == "src" or name.startswith("on") for name, _ in structure.attributes)
    assert "default-src 'none'" in document
    assert set(re.findall(r"https?://[^\s\"']+", document)) == {"http://www.w3.org/2000/svg"}
    # What only scripts can use is hidden until a script shows it; the steps are not.
    assert [value for name, value in structure.attributes if name == "hidden"] == [None]
    assert '<div class="bar" hidden>' in document


@pytest.mark.parametrize(
    "payload", ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "<!--\x00"]
)
def test_nothing_in_titles_notes_or_tokens_becomes_markup(payload: str):
    def structure(words: str) -> Structure:
        tree = RadixTree(page_size=1)
        tree.insert_prefix([1], [1], namespace=words)
        replay = Replay(lambda ids: words)
        replay.add(words, tree.snapshot(), words)
        return Structure(replay.render_html(words))

    hostile, plain = structure(payload), structure("x")
    assert hostile.tags == plain.tags
    assert [name for name, _ in hostile.attributes] == [name for name, _ in plain.attributes]


def test_notebooks_get_the_page_in_a_sandbox_of_its_own():
    replay = three_frames()
    structure = Structure(replay._repr_html_())
    assert structure.tags == ["iframe"]
    assert dict(structure.attributes)["srcdoc"] == replay.render_html()
    assert dict(structure.attributes)["sandbox"] == "allow-scripts"


def test_frames_are_kept_and_bounds_are_checked():
    replay = three_frames()
    assert [frame.title for frame in replay.frames] == ["Nothing", "Insert", "Match and lock"]
    assert Replay().render_svg().startswith("<svg")
    assert "<ol" in Replay().render_html()
    with pytest.raises(ValueError, match="max_nodes=0"):
        Replay(max_nodes=0)


def test_page_of_one_step_needs_no_buttons():
    assert "steps.length < 2" in page("t", [("a", "<svg></svg>")])


def test_a_trimmed_node_is_told_from_a_split_one():
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    before = tree.snapshot()
    assert tree.evict(1, trim=True).tolist() == [3]
    changes = find_changes(before, tree.snapshot())
    assert (list(changes.badges.values()), changes.summary) == (["trimmed"], "change: −1 token (page 3)")


def test_a_page_that_was_given_to_another_prefix_is_no_split():
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    before = tree.snapshot()
    [page] = tree.evict(1, trim=True)
    tree.insert_prefix([7], [page])
    changes = find_changes(before, tree.snapshot())
    assert sorted(filter(None, changes.badges.values())) == ["new", "trimmed"]
    assert changes.summary == "change: +1 token (page 3) · −1 token (page 3)"
