"""A node's box: its tokens, then how many, in which pages, how often hit; a padlock with the number of its locks."""

from collections.abc import Mapping

from radix_jax.viz.labels import Decode, count, num_columns, page_ranges, root_label, token_label
from radix_jax.viz.layout import BOX_HEIGHT, Box
from radix_jax.viz.outline import Hidden
from radix_jax.viz.shapes import LABEL_COLUMN, TEXT_COLUMN, padlock, rect, safe, text
from radix_jax.viz.snapshot import NodeSnapshot

_PAD = 10
_LABEL_ROOM = 28  # columns of tokens
_ROOT_ROOM = 40
_PAGES_ROOM = 14  # columns of page ids; where they need more, pages are counted
_HOVER_ROOM = 200  # columns of tokens, and of pages, shown while the pointer rests on a node
_ROOT_HEIGHT = 28
_PADLOCK_WIDTH = 13


def box_width(box: Box, decode: Decode | None) -> float:
    """Pixels that the box needs, whatever the reader's fonts."""
    if isinstance(box.item, NodeSnapshot) and box.item.state == "root":
        return num_columns(root_label(box.item, _ROOT_ROOM)) * TEXT_COLUMN + 2 * _PAD
    label, facts = _label(box, decode), _facts(box.item)
    label_width = num_columns(label) * LABEL_COLUMN + _locks_width(box.item)
    return max(label_width, num_columns(facts) * TEXT_COLUMN) + 2 * _PAD


def draw_box(box: Box, badges: Mapping[int, str], decode: Decode | None) -> str:
    """The box with all its text. badges: by node id, a word on its upper border."""
    item = box.item
    x = round(box.x, 1)
    if isinstance(item, NodeSnapshot) and item.state == "root":
        y = round(box.middle - _ROOT_HEIGHT / 2, 1)
        words = root_label(item, _ROOT_ROOM)
        return rect(x, y, box.width, _ROOT_HEIGHT, "rj-plain", radius=14) + text(x + _PAD, y + 18, words)
    y = round(box.y, 1)
    state = "hidden" if isinstance(item, Hidden) else item.state
    parts = [
        f"<g><title>{safe(_hover(item, decode))}</title>\n",
        rect(x, y, box.width, BOX_HEIGHT, f"rj-{state}"),
        text(x + _PAD, y + 18, _label(box, decode), "rj-label" if isinstance(item, NodeSnapshot) else ""),
        text(x + _PAD, y + 35, _facts(item), "rj-faint"),
    ]
    right = round(x + box.width, 1)
    if isinstance(item, NodeSnapshot):
        if item.num_locks:
            left = round(right - _locks_width(item), 1)
            parts += [
                padlock(left, y + 7),
                text(left + _PADLOCK_WIDTH, y + 18, f"{item.num_locks}", "rj-locks rj-bold"),
            ]
        parts.append(_badge(right, y, badges.get(item.node_id, "")))
    return "".join([*parts, "</g>\n"])


def _badge(right: float, y: float, words: str) -> str:
    if not words:
        return ""
    width = round(num_columns(words) * TEXT_COLUMN + 12, 1)
    left = round(right - width - 8, 1)
    return rect(left, y - 8, width, 15, "rj-badge", radius=7.5) + text(
        round(left + width / 2, 1), y + 3, words, "rj-cell rj-inverse"
    )


def _label(box: Box, decode: Decode | None) -> str:
    if isinstance(box.item, NodeSnapshot):
        return token_label(box.item, decode, _LABEL_ROOM)
    noun = ("namespace", "namespaces") if box.parent is None else ("child", "children")
    return f"… {box.item.num_children:,} more {noun[box.item.num_children > 1]}"


def _facts(item: NodeSnapshot | Hidden) -> str:
    if isinstance(item, Hidden):
        nodes = "" if item.num_nodes == item.num_children else f"{count(item.num_nodes, 'node')} · "
        locked = f" · {item.num_locked_tokens:,} locked" if item.num_locked_tokens else ""
        return f"{nodes}{count(item.num_tokens, 'token')}{locked}"
    num_pages = len(item.page_ids)
    ranges = page_ranges(item.page_ids, _PAGES_ROOM)
    pages = count(num_pages, "page") if ranges.endswith("…") else f"{'page' if num_pages == 1 else 'pages'} {ranges}"
    return f"{count(len(item.token_ids), 'token')} · {pages} · {count(item.num_hits, 'hit')}"


def _hover(item: NodeSnapshot | Hidden, decode: Decode | None) -> str:
    """What the pointer shows; also what a screen reader says, so the state is in words."""
    if isinstance(item, Hidden):
        return f"left out: {_facts(item)}"
    state = f"locked by {item.num_locks:,}" if item.state == "locked" else item.state
    ids = token_label(item, None, _HOVER_ROOM)
    tokens = ids if decode is None else f"{token_label(item, decode, _HOVER_ROOM)}; ids {ids}"
    return (
        f"{state}; {count(len(item.token_ids), 'token')}: {tokens}; pages {page_ranges(item.page_ids, _HOVER_ROOM)}; "
        f"{count(item.num_hits, 'hit')}; node {item.node_id}, depth {item.depth}"
    )


def _locks_width(item: NodeSnapshot | Hidden) -> float:
    """Room for padlock and number, at the right end of the tokens."""
    if isinstance(item, Hidden) or not item.num_locks:
        return 0
    return _PADLOCK_WIDTH + num_columns(f"{item.num_locks}") * TEXT_COLUMN + 8
