"""Where the boxes of a drawing lie: roots at the left, a column a depth, a row a leaf, a parent halfway."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from radix_jax.viz.outline import Hidden, Outline, Tails
from radix_jax.viz.snapshot import NodeSnapshot

_NODE_HEIGHT = 44
_LOW_HEIGHT = 28  # of what is told in one line: a root, tails, what is left out
_COLUMN_GAP = 42
_SIBLING_GAP = 12  # between boxes of one parent
_FAMILY_GAP = 18  # between boxes of different parents


@dataclass
class Box:
    """A node, or the tails under one, or what is left out there. parent: index of the parent's box, None for a root.
    x, y: its upper left corner; all in pixels.
    """

    item: NodeSnapshot | Tails | Hidden
    parent: int | None
    depth: int
    num_tokens: int
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0

    @property
    def height(self) -> int:
        """Two lines of text, or one."""
        return _NODE_HEIGHT if isinstance(self.item, NodeSnapshot) and self.item.state != "root" else _LOW_HEIGHT

    @property
    def middle(self) -> float:
        """y of its middle."""
        return self.y + self.height / 2

    @property
    def bottom(self) -> float:
        """y of its lower border."""
        return self.y + self.height


def place(outline: Outline, box_width: Callable[[Box], float]) -> list[Box]:
    """All boxes in their places, a parent before its children; the upper left corner of all is (0, 0)."""
    boxes = _boxes(outline)
    _set_columns(boxes, box_width)
    _set_rows(boxes)
    return boxes


def _boxes(outline: Outline) -> list[Box]:
    boxes: list[Box] = []
    stack = _family(outline, None, None, 0)
    while stack:
        box = stack.pop()
        boxes.append(box)
        if isinstance(box.item, NodeSnapshot):
            stack.extend(_family(outline, box.item.node_id, len(boxes) - 1, box.depth + 1))
    return boxes


def _family(outline: Outline, parent_id: int | None, parent: int | None, depth: int) -> list[Box]:
    """Boxes of what is drawn under a parent, last one first."""
    family = [Box(node, parent, depth, outline.subtree_len(node.node_id)) for node in outline.children(parent_id)]
    hidden = outline.hidden(parent_id)
    if hidden is not None:
        family.append(Box(hidden, parent, depth, hidden.num_tokens))
    tails = outline.tails(parent_id)
    if tails is not None:
        family.append(Box(tails, parent, depth, sum(len(tail.token_ids) for tail in tails.tails)))
    return family[::-1]


def _set_columns(boxes: list[Box], box_width: Callable[[Box], float]) -> None:
    """Boxes of a column are equally wide, so that what belongs to one depth lies on one line."""
    widths: dict[int, float] = {}
    for box in boxes:
        widths[box.depth] = max(widths.get(box.depth, 0.0), box_width(box))
    lefts: dict[int, float] = {}
    left = 0.0
    for depth in sorted(widths):
        lefts[depth] = left
        left += widths[depth] + _COLUMN_GAP
    for box in boxes:
        box.x, box.width = lefts[box.depth], widths[box.depth]


def _set_rows(boxes: list[Box]) -> None:
    """Families lie below each other and never overlap; a box's middle is halfway between its first and last child's."""
    families: dict[int | None, list[int]] = {}
    for index, box in enumerate(boxes):
        families.setdefault(box.parent, []).append(index)
    spans = [float(box.height) for box in boxes]  # height of a box with all that hangs on it
    for index in range(len(boxes) - 1, -1, -1):
        spans[index] = max(spans[index], _stack_height(families.get(index, ()), spans, families))
    for (
        parent,
        family,
    ) in families.items():  # in the order of their parents, so that a parent's y is the top of its span
        top = 0.0
        if parent is not None:
            top = boxes[parent].y + (spans[parent] - _stack_height(family, spans, families)) / 2
        for index, gap in zip(family, _gaps(family, families), strict=True):
            boxes[index].y = top
            top += spans[index] + gap
    for index in range(len(boxes) - 1, -1, -1):
        box, family = boxes[index], families.get(index)
        if family:
            box.y = (boxes[family[0]].middle + boxes[family[-1]].middle - box.height) / 2


def _stack_height(family: Sequence[int], spans: Sequence[float], families: Mapping[int | None, Sequence[int]]) -> float:
    return sum(spans[index] for index in family) + sum(_gaps(family, families))


def _gaps(family: Sequence[int], families: Mapping[int | None, Sequence[int]]) -> list[int]:
    """Space below each of a family; none below the last."""
    gaps = [
        _FAMILY_GAP if above in families or below in families else _SIBLING_GAP
        for above, below in itertools.pairwise(family)
    ]
    return [*gaps, 0] if family else []
