"""The few SVG elements that drawings are made of. All text passes through here and is escaped here."""

from collections.abc import Sequence
from html import escape

from radix_jax.viz.labels import cut, num_columns, printable

LABEL_COLUMN = 7.3  # pixels that a column of a label may take, by the widest of the usual fixed-width fonts
TEXT_COLUMN = 6.3  # the same for small text
_SAMPLE_WIDTH = 24
_SAMPLE_GAP = 22


def text(x: float, y: float, words: str, css: str = "", room: int = 200) -> str:
    """A line of text that starts at x, its baseline at y, in at most `room` columns."""
    return f'<text{_css(css)} x="{x:g}" y="{y:g}">{escape(cut(printable(words), room))}</text>\n'


def rect(x: float, y: float, width: float, height: float, css: str, radius: float = 5) -> str:
    """A rectangle with round corners."""
    return (
        f'<rect{_css(css)} x="{round(x, 1):g}" y="{round(y, 1):g}" width="{round(width, 1):g}" height="{height:g}" '
        f'rx="{radius:g}"/>\n'
    )


def move(x: float, y: float, body: str) -> str:
    """The elements, moved."""
    return f'<g transform="translate({x:g} {y:g})">\n{body}</g>\n'


def padlock(x: float, y: float) -> str:
    """A closed padlock 9 wide and 11 high."""
    return (
        f'<path class="rj-shackle" stroke-width="1.5" d="M{x + 2:g} {y + 5:g}v-2a2.5 2.5 0 0 1 5 0v2"/>'
        f'<rect class="rj-padlock" x="{x:g}" y="{y + 5:g}" width="9" height="6.5" rx="1"/>\n'
    )


def pin(x: float, y: float) -> str:
    """A pin 9 wide and 11 high."""
    return (
        f'<path class="rj-shackle rj-needle" stroke-width="1.5" d="M{x + 4.5:g} {y + 6:g}v5.5"/>'
        f'<circle class="rj-pin" cx="{x + 4.5:g}" cy="{y + 3.5:g}" r="3.5"/>\n'
    )


def samples(entries: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """A row of small boxes, each of a class of the style sheet, and what they mean; also the row's width."""
    parts = []
    x = 0
    for css, words in entries:
        if css == "rj-branch":
            parts.append(f'<path class="{css}" stroke-width="5" d="M{x} 8h{_SAMPLE_WIDTH}"/>\n')
        else:
            parts.append(rect(x + 1, 1, _SAMPLE_WIDTH - 2, 14, css, radius=3))
        if css == "rj-locked":
            parts.append(padlock(x + 7.5, 1.5))
        if css == "rj-pinned":
            parts.append(pin(x + 7.5, 2))
        parts.append(text(x + _SAMPLE_WIDTH + 6, 12, words))
        x += _SAMPLE_WIDTH + 6 + round(num_columns(words) * TEXT_COLUMN) + _SAMPLE_GAP
    return "".join(parts), x - _SAMPLE_GAP


def safe(words: str) -> str:
    """Printable text for an element or a quoted attribute."""
    return escape(printable(words), quote=True)


def _css(css: str) -> str:
    return f' class="{css}"' if css else ""
