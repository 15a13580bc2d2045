"""A TreeSnapshot as an SVG drawing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from radix_jax.viz.boxes import box_width, draw_box, is_locked
from radix_jax.viz.changes import Changes
from radix_jax.viz.labels import Decode, count, num_columns, totals
from radix_jax.viz.layout import Box, place
from radix_jax.viz.outline import Hidden, Outline
from radix_jax.viz.shapes import TEXT_COLUMN, move, rect, safe, samples, text
from radix_jax.viz.snapshot import PoolSnapshot, TreeSnapshot
from radix_jax.viz.strip import draw_pages
from radix_jax.viz.style import svg_css

_MARGIN = 20
_MIN_WIDTH = 640  # what the totals need of most trees
_MAX_BRANCH = 7.0


@dataclass(frozen=True)
class Drawing:
    """SVG elements that fill a rectangle of width x height pixels from (0, 0) on."""

    body: str
    width: int
    height: int


def render_svg(snapshot: TreeSnapshot, decode: Decode | None = None, max_nodes: int = 40, max_depth: int = 6) -> str:
    """Draw the tree as one SVG element: a box a node, with its tokens, pages, hits and locks, coloured by state.

    decode: token ids -> text; without it the ids are shown. max_nodes: nodes drawn at most, those with the most tokens
    at and below them first, up to six children of a node before any further ones. max_depth: levels drawn below
    the roots. What is left out is summed up in dashed boxes, so that the size is bounded by max_nodes whatever the
    tree. The drawing needs nothing from outside, follows the reader's light or dark setting, and is the same for the
    same snapshot.

    Raises:
        ValueError: max_nodes or max_depth below 1.
    """
    if max_nodes < 1 or max_depth < 1:
        raise ValueError(f"max_nodes={max_nodes} and max_depth={max_depth} must be at least 1")
    drawing = draw(snapshot, Outline(snapshot, max_nodes, max_depth), decode, "Radix tree")
    return svg_element(on_paper(drawing, drawing.width), f"radix tree, {totals(snapshot)}", svg_css())


def svg_element(drawing: Drawing, description: str, style: str) -> str:
    """The drawing as an SVG element.

    description: its name for screen readers. style: the style sheet, "" in a page that has it.
    """
    width, height = drawing.width, drawing.height
    sheet = f"<style>\n{style}</style>\n" if style else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" class="rj-tree" role="group" '
        f'aria-label="{safe(description)}" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f"{sheet}{drawing.body}</svg>\n"
    )


def draw(
    snapshot: TreeSnapshot,
    outline: Outline,
    decode: Decode | None,
    title: str,
    notes: Sequence[str] = (),
    changes: Changes | None = None,
    pool: PoolSnapshot | None = None,
) -> Drawing:
    """Title, notes, totals, the pool's pages, the tree with what changed, and the legend."""
    boxes = place(outline, lambda box: box_width(box, decode))
    legend, legend_width = samples(_legend(snapshot, outline, with_states=pool is None))
    summary = totals(snapshot)
    summary_width = round(num_columns(summary) * TEXT_COLUMN)
    width = max([_MIN_WIDTH, summary_width, legend_width, *(round(box.x + box.width) for box in boxes)])
    room = int(width / TEXT_COLUMN)
    parts = [text(0, 14, title, "rj-title", room=room * 2 // 3)]
    y = 17
    for line, css in [*((note, "") for note in notes), (summary, "rj-faint")]:
        y += 18
        parts.append(text(0, y, line, css, room))
    if pool is not None:
        pages, width, height = draw_pages(snapshot, pool, width)
        parts.append(move(0, y + 14, pages))
        y += 14 + height
    y += 22
    if boxes:
        parts.append(move(0, y, _tree(boxes, {} if changes is None else changes.badges, decode)))
        y += round(max(box.bottom for box in boxes))
    else:
        y += 12
        parts.append(text(0, y, "nothing is cached", "rj-faint"))
    if legend:
        parts.append(move(0, y + 24, legend))
        y += 40
    return Drawing("".join(parts), width, y)


def on_paper(drawing: Drawing, width: int) -> Drawing:
    """The drawing on a sheet of its own, `width` pixels of it inside the margins."""
    width, height = width + 2 * _MARGIN, drawing.height + 2 * _MARGIN
    paper = rect(0.5, 0.5, width - 1, height - 1, "rj-paper", radius=8)
    return Drawing(paper + move(_MARGIN, _MARGIN, drawing.body), width, height)


def _tree(boxes: Sequence[Box], badges: Mapping[int, str], decode: Decode | None) -> str:
    num_tokens = sum(box.num_tokens for box in boxes if box.parent is None)
    branches = (_branch(boxes[box.parent], box, num_tokens) for box in boxes if box.parent is not None)
    return "".join([*branches, *(draw_box(box, badges, decode) for box in boxes)])


def _branch(parent: Box, box: Box, num_tokens: int) -> str:
    """A curve from parent to child, the thicker, the more of the tree's tokens lie there."""
    left, right = round(parent.x + parent.width, 1), round(box.x, 1)
    bend = round((left + right) / 2, 1)
    start, end = round(parent.middle, 1), round(box.middle, 1)
    stroke = 1 + (_MAX_BRANCH - 1) * (box.num_tokens / max(num_tokens, 1)) ** 0.5
    is_held = is_locked(box.item) and not isinstance(box.item, Hidden)
    css = "rj-held" if is_held else "rj-branch"
    return (
        f'<path class="{css}" stroke-width="{stroke:.1f}" '
        f'd="M{left:g} {start:g}C{bend:g} {start:g} {bend:g} {end:g} {right:g} {end:g}"/>\n'
    )


def _legend(snapshot: TreeSnapshot, outline: Outline, with_states: bool) -> list[tuple[str, str]]:
    """Pins and tails are explained where there are any."""
    entries = []
    if with_states:
        entries.append(("rj-locked", "locked, and how often"))
        if snapshot.num_pinned_tokens:
            entries.append(("rj-pinned", "pinned: evicted last"))
        entries += [("rj-evictable", "evictable, leaves first"), ("rj-branch", "the thicker, the more tokens")]
    if snapshot.tails:
        entries.append(("rj-evictable rj-tail", "tail: a page filled in part"))
    if outline.num_hidden:
        entries.append(("rj-hidden", f"left out: {count(outline.num_hidden, 'node')}"))
    return entries
