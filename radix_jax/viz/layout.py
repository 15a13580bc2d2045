"""Where the boxes of a drawing lie: roots at the left, a column a depth, a row a leaf, a parent halfway."""

from collections.abc import Callable
from dataclasses import dataclass

from radix_jax.viz.outline import Hidden, Outline
from radix_jax.viz.snapshot import NodeSnapshot

BOX_HEIGHT = 44
_COLUMN_GAP = 42
_SIBLING_GAP = 14  # between boxes of one parent
_FAMILY_GAP = 22  # between boxes of different parents


@dataclass
class Box:
    """A node, or what is left out under one. parent: index of the parent's box, None for a root. x, y: its upper left
    corner; all in pixels.
    """

    item: NodeSnapshot | Hidden
    parent: int | None
    depth: int
    num_tokens: int
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0

    @property
    def middle(self) -> float:
        """y of its middle."""
        return self.y + BOX_HEIGHT / 2


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
    """Leaves go below each other; a parent's middle is the middle between its first and its last child."""
    has_children = {box.parent for box in boxes}
    bottom: float | None = None
    parent_above: int | None = None
    for index, box in enumerate(boxes):
        if index not in has_children:
            gap = _SIBLING_GAP if box.parent == parent_above and box.parent is not None else _FAMILY_GAP
            box.y = 0.0 if bottom is None else bottom + gap
            bottom, parent_above = box.y + BOX_HEIGHT, box.parent
    spans: dict[int, tuple[float, float]] = {}
    for index in range(len(boxes) - 1, -1, -1):
        box = boxes[index]
        if index in spans:
            box.y = sum(spans[index]) / 2
        if box.parent is not None:
            spans[box.parent] = (box.y, spans.get(box.parent, (box.y, box.y))[1])
