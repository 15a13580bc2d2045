"""What happened to a tree between two snapshots of it."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from radix_jax.viz.labels import count, page_ranges
from radix_jax.viz.snapshot import NodeSnapshot, TreeSnapshot

_PAGES_ROOM = 40


@dataclass(frozen=True)
class Changes:
    """badges: by node id, what happened to the node in a word or two. summary: a line on what came and went, or ""."""

    badges: dict[int, str]
    summary: str


def find_changes(before: TreeSnapshot, after: TreeSnapshot) -> Changes:
    """Compare two snapshots of one tree. A node that holds nothing but pages of before comes from a split."""
    old_nodes = {node.node_id: node for node in before.nodes}
    old_pages, new_pages = _pages(before), _pages(after)
    badges = {}
    for node in after.nodes:
        badge = _badge(old_nodes.get(node.node_id), node, old_pages)
        if badge:
            badges[node.node_id] = badge
    parts = []
    for pages, sign in ((np.setdiff1d(new_pages, old_pages), "+"), (np.setdiff1d(old_pages, new_pages), "−")):
        if len(pages):
            noun = "page" if len(pages) == 1 else "pages"
            num_tokens = count(len(pages) * after.page_size, "token")
            parts.append(f"{sign}{num_tokens} ({noun} {page_ranges(pages, _PAGES_ROOM)})")
    num_locked = after.num_locked_tokens - before.num_locked_tokens
    if num_locked:
        parts.append(f"{_signed(num_locked)} locked")
    return Changes(badges, f"change: {' · '.join(parts)}" if parts else "")


def _badge(old: NodeSnapshot | None, node: NodeSnapshot, old_pages: Int32[np.ndarray, " P"]) -> str:
    if node.state == "root":
        return ""
    if old is None:
        return "split" if np.isin(node.page_ids, old_pages).all() else "new"
    words = []
    if len(node.token_ids) < len(old.token_ids):
        words.append("split")
    if node.num_hits > old.num_hits:
        words.append("hit")
    if node.num_locks != old.num_locks:
        words.append(_lock_change(old.num_locks, node.num_locks))
    return ", ".join(words)


def _pages(snapshot: TreeSnapshot) -> Int32[np.ndarray, " P"]:
    return np.concatenate([np.empty(0, np.int32), *(node.page_ids for node in snapshot.nodes)])


def _lock_change(before: int, after: int) -> str:
    if not before or not after:
        return "locked" if after else "unlocked"
    return f"{_signed(after - before)} {'lock' if abs(after - before) == 1 else 'locks'}"


def _signed(number: int) -> str:
    return f"{'+' if number > 0 else '−'}{abs(number):,}"
