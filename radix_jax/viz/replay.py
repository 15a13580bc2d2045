"""A cache's work step by step: each step a title and the tree after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from radix_jax.viz.changes import find_changes
from radix_jax.viz.labels import Decode, totals
from radix_jax.viz.outline import Outline
from radix_jax.viz.replay_page import page
from radix_jax.viz.shapes import move
from radix_jax.viz.snapshot import PoolSnapshot, TreeSnapshot
from radix_jax.viz.style import svg_css
from radix_jax.viz.svg import Drawing, draw, on_paper, svg_element

_GAP = 16


@dataclass(frozen=True, eq=False)
class Frame:
    """title: what was done. snapshot: the tree after it. note: a line on what to look at. pool: whose pages to show."""

    title: str
    snapshot: TreeSnapshot
    note: str = ""
    pool: PoolSnapshot | None = None


class Replay:
    """Frames in the order they were added, drawn with what changed from each to the next.

    decode, max_nodes, max_depth: as for `render_svg`; each frame is bounded by them.

    Raises:
        ValueError: max_nodes or max_depth below 1.
    """

    def __init__(self, decode: Decode | None = None, max_nodes: int = 40, max_depth: int = 6) -> None:
        if max_nodes < 1 or max_depth < 1:
            raise ValueError(f"max_nodes={max_nodes} and max_depth={max_depth} must be at least 1")
        self._decode = decode
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._frames: list[Frame] = []

    @property
    def frames(self) -> Sequence[Frame]:
        """The frames so far."""
        return tuple(self._frames)

    def add(self, title: str, snapshot: TreeSnapshot, note: str = "", pool: PoolSnapshot | None = None) -> None:
        """Add what was done and the tree after it. pool: shows whose each page is, which an allocation changes."""
        self._frames.append(Frame(title, snapshot, note, pool))

    def render_svg(self) -> str:
        """All frames below each other in one SVG element."""
        drawings = self._drawings()
        parts, y = [], 0
        for drawing in drawings:
            parts.append(move(0, y, drawing.body))
            y += drawing.height + _GAP
        whole = Drawing("".join(parts), max((drawing.width for drawing in drawings), default=0), max(y - _GAP, 0))
        titles = "; ".join(f"{number}. {frame.title}" for number, frame in enumerate(self._frames, 1))
        return svg_element(whole, f"radix tree step by step: {titles}", svg_css())

    def render_html(self, title: str = "Radix tree, step by step") -> str:
        """One HTML page that needs nothing else: all frames, or one at a time by buttons and keys where scripts run."""
        steps = []
        for frame, drawing in zip(self._frames, self._drawings(), strict=True):
            steps.append((frame.title, svg_element(drawing, f"{frame.title}: {totals(frame.snapshot)}", style="")))
        return page(title, steps)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that neither styles nor scripts reach the notebook."""
        height = 220 + max((drawing.height for drawing in self._drawings()), default=0)
        document = escape(self.render_html(), quote=True)
        style = f"width:100%;height:{height}px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{document}"></iframe>'

    def _drawings(self) -> list[Drawing]:
        """All frames, equally wide."""
        drawings, before = [], None
        for number, frame in enumerate(self._frames, 1):
            changes = None if before is None else find_changes(before, frame.snapshot)
            notes = [frame.note] if frame.note else []
            if changes is not None and changes.summary:
                notes.append(changes.summary)
            outline = Outline(frame.snapshot, self._max_nodes, self._max_depth)
            title = f"{number}. {frame.title}"
            drawings.append(draw(frame.snapshot, outline, self._decode, title, notes, changes, frame.pool))
            before = frame.snapshot
        width = max((drawing.width for drawing in drawings), default=0)
        return [on_paper(drawing, width) for drawing in drawings]
