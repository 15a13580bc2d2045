"""A pool's pages in a row, each with its owner."""

from collections.abc import Sequence

import numpy as np

from radix_jax.viz.shapes import move, rect, samples, text
from radix_jax.viz.snapshot import PoolSnapshot, TreeSnapshot

_MAX_CELLS = 96
_CELL_WIDTH, _CELL_HEIGHT, _CELL_GAP = 27, 20, 4
_COUNTS_LEFT = 130
_OWNERS = (
    ("rj-locked", "locked"),
    ("rj-pinned", "pinned"),
    ("rj-evictable", "evictable"),
    ("rj-private", "private"),
    ("rj-hidden", "free"),
)
_LOCKED, _PINNED, _EVICTABLE, _PRIVATE, _FREE = range(len(_OWNERS))
_BY_STATE = {"locked": _LOCKED, "pinned": _PINNED, "evictable": _EVICTABLE}


def draw_pages(snapshot: TreeSnapshot, pool: PoolSnapshot, width: int) -> tuple[str, int, int]:
    """How many pages each owner has and, unless the pool is large, a cell a page in the order of their ids.

    The null page is left out, and the word of pinned pages where there are none. Returns the elements, how wide they
    are, at least `width`, and how high.
    """
    owners = np.full(pool.num_pages, _FREE)
    owners[pool.private_pages] = _PRIVATE
    for node in snapshot.nodes:
        if node.state != "root":
            owners[node.page_ids] = _BY_STATE[node.state]
    for tail in snapshot.tails:
        owners[tail.page_id] = _LOCKED if tail.num_locks else _EVICTABLE
    numbers = np.bincount(owners[1:], minlength=len(_OWNERS)).tolist()
    entries = [
        (css, f"{number:,} {name}")
        for (css, name), number in zip(_OWNERS, numbers, strict=True)
        if number or css != "rj-pinned"
    ]
    counts, counts_width = samples(entries)
    noun = "page" if pool.num_pages == 2 else "pages"
    parts = [text(0, 12, f"Pool of {pool.num_pages - 1:,} {noun}"), move(_COUNTS_LEFT, 0, counts)]
    width = max(width, _COUNTS_LEFT + counts_width)
    if pool.num_pages - 1 > _MAX_CELLS:
        return "".join(parts), width, 16
    num_columns = (width + _CELL_GAP) // (_CELL_WIDTH + _CELL_GAP)
    parts += _cells(owners.tolist(), num_columns)
    num_rows = -(-(pool.num_pages - 1) // num_columns)
    return "".join(parts), width, 24 + num_rows * (_CELL_HEIGHT + _CELL_GAP)


def _cells(owners: Sequence[int], num_columns: int) -> list[str]:
    parts = []
    for page, owner in enumerate(owners):
        if page == 0:
            continue
        row, column = divmod(page - 1, num_columns)
        x, y = column * (_CELL_WIDTH + _CELL_GAP), 24 + row * (_CELL_HEIGHT + _CELL_GAP)
        parts.append(rect(x + 1, y + 1, _CELL_WIDTH - 2, _CELL_HEIGHT - 2, _OWNERS[owner][0], radius=3))
        css = "rj-cell rj-inverse" if owner == _PRIVATE else "rj-cell rj-faint" if owner == _FREE else "rj-cell rj-bold"
        parts.append(text(x + _CELL_WIDTH / 2, y + 14, str(page), css))
    return parts
