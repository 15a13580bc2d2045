"""A node's box: its tokens, then how many, in which pages, how often hit; a padlock and a pin with their numbers."""

from collections.abc import Mapping

from radix_jax.viz.labels import Decode, count, num_columns, page_ranges, root_label, tails_label, token_label
from radix_jax.viz.layout import Box
from radix_jax.viz.outline import Hidden, Tails
from radix_jax.viz.shapes import LABEL_COLUMN, TEXT_COLUMN, padlock, pin, rect, safe, text
from radix_jax.viz.snapshot import NodeSnapshot

_PAD = 10
_LABEL_ROOM = 28  # columns of tokens
_ROOT_ROOM = 40
_TAILS_ROOM = 44
_PAGES_ROOM = 14  # columns of page ids; where they need more, pages are counted
_HOVER_ROOM = 200  # columns of tokens, and of pages, shown while the pointer rests on a node
_SIGN_WIDTH = 13  # of a padlock or pin


def box_width(box: Box, decode: Decode | None) -> float:
    """Pixels that the box needs, whatever the reader's fonts."""
    item = box.item
    if not isinstance(item, NodeSnapshot) or item.state == "root":
        return num_columns(_line(box, decode)) * TEXT_COLUMN + _signs_width(item) + 2 * _PAD
    label_width = num_columns(token_label(item, decode, _LABEL_ROOM)) * LABEL_COLUMN + _signs_width(item)
    return max(label_width, num_columns(_facts(item)) * TEXT_COLUMN) + 2 * _PAD


def draw_box(box: Box, badges: Mapping[int, str], decode: Decode | None) -> str:
    """The box with all its text. badges: by node id, a word or two on its upper border."""
    item = box.item
    x, y = round(box.x, 1), round(box.y, 1)
    right = round(x + box.width, 1)
    left = round(right - _signs_width(item), 1)
    if not isinstance(item, NodeSnapshot) or item.state == "root":
        css, radius = _line_style(box)
        parts = [rect(x, y, box.width, box.height, css, radius), text(x + _PAD, y + 18, _line(box, decode), "")]
        if is_locked(item):
            parts.append(padlock(left, y + 7))
    else:
        parts = [
            rect(x, y, box.width, box.height, f"rj-{item.state}"),
            text(x + _PAD, y + 18, token_label(item, decode, _LABEL_ROOM), "rj-label"),
            text(x + _PAD, y + 35, _facts(item), "rj-faint"),
            _badge(left, y, badges.get(item.node_id, "")),
        ]
        for sign, number, css in ((padlock, item.num_locks, "rj-locks"), (pin, item.num_pins, "rj-pins")):
            if number:
                parts += [sign(left, y + 7), text(left + _SIGN_WIDTH, y + 18, f"{number}", f"{css} rj-bold")]
                left = round(left + _sign_width(number), 1)
    return "".join([f"<g><title>{safe(_hover(box, decode))}</title>\n", *parts, "</g>\n"])


def is_locked(item: NodeSnapshot | Tails | Hidden) -> bool:
    """Whether anything of what the box stands for is locked."""
    if isinstance(item, NodeSnapshot):
        return item.state == "locked"
    if isinstance(item, Tails):
        return any(tail.num_locks for tail in item.tails)
    return item.num_locked_tokens > 0


def _badge(right: float, y: float, words: str) -> str:
    if not words:
        return ""
    width = round(num_columns(words) * TEXT_COLUMN + 12, 1)
    left = round(right - width - 8, 1)
    return rect(left, y - 8, width, 15, "rj-badge", radius=7.5) + text(
        round(left + width / 2, 1), y + 3, words, "rj-cell rj-inverse"
    )


def _line_style(box: Box) -> tuple[str, float]:
    """Class, and radius of the corners, of what is told in one line."""
    if isinstance(box.item, NodeSnapshot):
        return "rj-plain", box.height / 2
    if isinstance(box.item, Tails):
        return f"{'rj-locked' if is_locked(box.item) else 'rj-evictable'} rj-tail", 5
    return "rj-hidden", 5


def _line(box: Box, decode: Decode | None) -> str:
    """What is told in one line."""
    if isinstance(box.item, NodeSnapshot):
        return root_label(box.item, _ROOT_ROOM)
    if isinstance(box.item, Tails):
        return tails_label(box.item.tails, box.item.is_lost, decode, _TAILS_ROOM)
    if box.parent is None:
        noun = "namespace" if box.item.num_children == 1 else "namespaces"
        return f"… {box.item.num_children:,} more {noun} · {count(box.item.num_tokens, 'token')}"
    noun = "node" if box.item.num_nodes == 1 else "nodes"
    return f"… {box.item.num_nodes:,} more {noun} · {count(box.item.num_tokens, 'token')}"


def _facts(node: NodeSnapshot) -> str:
    num_pages = len(node.page_ids)
    ranges = page_ranges(node.page_ids, _PAGES_ROOM)
    pages = count(num_pages, "page") if ranges.endswith("…") else f"{'page' if num_pages == 1 else 'pages'} {ranges}"
    return f"{count(len(node.token_ids), 'token')} · {pages} · {count(node.num_hits, 'hit')}"


def _hover(box: Box, decode: Decode | None) -> str:
    """What the pointer shows; also what a screen reader says, so the state is in words."""
    item = box.item
    if isinstance(item, Hidden):
        return (
            f"left out: {item.num_children:,} more below the same parent, in all {count(item.num_nodes, 'node')} and "
            f"{count(item.num_tokens, 'token')}, {item.num_locked_tokens:,} of them locked"
        )
    if isinstance(item, Tails):
        what = "their prefixes were evicted, so they go first" if item.is_lost else "the ends of requests, to copy from"
        return f"pages filled in part, {what}; {tails_label(item.tails, item.is_lost, decode, _HOVER_ROOM)}"
    if item.state == "root":
        return f"{root_label(item, _HOVER_ROOM)}; {count(box.num_tokens, 'token')} below"
    states = [
        f"{word} by {number:,}" for word, number in (("locked", item.num_locks), ("pinned", item.num_pins)) if number
    ]
    state = ", ".join(states) or item.state
    ids = token_label(item, None, _HOVER_ROOM)
    tokens = ids if decode is None else f"{token_label(item, decode, _HOVER_ROOM)}; ids {ids}"
    return (
        f"{state}; {count(len(item.token_ids), 'token')}: {tokens}; pages {page_ranges(item.page_ids, _HOVER_ROOM)}; "
        f"{count(item.num_hits, 'hit')}"
    )


def _signs_width(item: NodeSnapshot | Tails | Hidden) -> float:
    """Room for padlock and pin with their numbers, at the right end of the first line."""
    if isinstance(item, NodeSnapshot):
        return sum(_sign_width(number) for number in (item.num_locks, item.num_pins) if number)
    return _SIGN_WIDTH + 8 if is_locked(item) else 0


def _sign_width(number: int) -> float:
    return _SIGN_WIDTH + num_columns(f"{number}") * LABEL_COLUMN + 8
