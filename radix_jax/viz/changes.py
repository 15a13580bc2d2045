"""What happened to a tree between two snapshots of it."""

from dataclasses import dataclass

import numpy as np

from radix_jax.viz.labels import count, page_ranges
from radix_jax.viz.snapshot import NodeSnapshot, TreeSnapshot

_PAGES_ROOM = 40


@dataclass(frozen=True)
class Changes:
    """badges: by node id, what happened to the node in a word or two. summary: a line on what came and went, or ""."""

    badges: dict[int, str]
    summary: str


def find_changes(before: TreeSnapshot, after: TreeSnapshot) -> Changes:
    """Compare two snapshots of one tree. A node that holds nothing but pages of before, with what was in them, comes
    from a split."""
    old_nodes = {node.node_id: node for node in before.nodes}
    old_pages, new_pages = (frozenset().union(*map(_pages, snapshot.nodes)) for snapshot in (before, after))
    badges = {}
    for node in after.nodes:
        badge = _badge(old_nodes.get(node.node_id), node, old_pages)
        if badge:
            badges[node.node_id] = badge
    parts = []
    for filled, sign in ((new_pages - old_pages, "+"), (old_pages - new_pages, "−")):
        if filled:
            pages = np.array(sorted(page for page, _ in filled), np.int32)
            noun = "page" if len(pages) == 1 else "pages"
            num_tokens = count(len(pages) * after.page_size, "token")
            parts.append(f"{sign}{num_tokens} ({noun} {page_ranges(pages, _PAGES_ROOM)})")
    for number, word in (
        (after.num_locked_tokens - before.num_locked_tokens, "locked"),
        (after.num_pinned_tokens - before.num_pinned_tokens, "pinned"),
    ):
        if number:
            parts.append(f"{_signed(number)} {word}")
    parts += _tail_changes(before, after)
    return Changes(badges, f"change: {' · '.join(parts)}" if parts else "")


def _badge(old: NodeSnapshot | None, node: NodeSnapshot, old_pages: frozenset[tuple[int, bytes]]) -> str:
    if node.state == "root":
        return ""
    if old is None:
        return "split" if old_pages.issuperset(_pages(node)) else "new"
    words = []
    if len(node.token_ids) < len(old.token_ids):
        # A split leaves a node its end, a trim its beginning.
        is_front = np.array_equal(node.page_ids, old.page_ids[: len(node.page_ids)])
        words.append("trimmed" if is_front else "split")
    if node.num_hits > old.num_hits:
        words.append("hit")
    if node.num_locks != old.num_locks:
        words.append(_change_of("lock", "locked", old.num_locks, node.num_locks))
    if node.num_pins != old.num_pins:
        words.append(_change_of("pin", "pinned", old.num_pins, node.num_pins))
    return ", ".join(words)


def _pages(node: NodeSnapshot) -> list[tuple[int, bytes]]:
    """(page, the tokens in it): a page that was evicted may hold others."""
    if not len(node.page_ids):
        return []
    rows = node.token_ids.reshape(len(node.page_ids), -1)
    return [(page, row.tobytes()) for page, row in zip(node.page_ids.tolist(), rows, strict=True)]


def _tail_changes(before: TreeSnapshot, after: TreeSnapshot) -> list[str]:
    """Tails that came, went, and were locked or unlocked."""
    old, new = ({(tail.page_id, tail.token_ids.tobytes()) for tail in snap.tails} for snap in (before, after))
    parts = []
    for tails, sign in ((new - old, "+"), (old - new, "−")):
        if tails:
            pages = np.array(sorted(page for page, _ in tails), np.int32)
            noun = "page" if len(pages) == 1 else "pages"
            parts.append(f"{sign}{count(len(pages), 'tail')} ({noun} {page_ranges(pages, _PAGES_ROOM)})")
    num_locked = sum(tail.num_locks > 0 for tail in after.tails) - sum(tail.num_locks > 0 for tail in before.tails)
    if num_locked:
        parts.append(f"{_signed(num_locked)} {'tail' if abs(num_locked) == 1 else 'tails'} locked")
    return parts


def _change_of(noun: str, state: str, before: int, after: int) -> str:
    """`locked`, `unlocked`, `+1 lock`."""
    if not before or not after:
        return state if after else f"un{state}"
    return f"{_signed(after - before)} {noun if abs(after - before) == 1 else f'{noun}s'}"


def _signed(number: int) -> str:
    return f"{'+' if number > 0 else '−'}{abs(number):,}"
