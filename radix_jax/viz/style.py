"""Colours of the drawings, in light and in dark.

Orange and blue stay apart for every common form of colour blindness, and no meaning rests on colour alone: what is
locked also has a thick border and a padlock, what is pinned a pin, a tail a dotted border and what is left out a dashed
one.
"""

from collections.abc import Mapping
from types import MappingProxyType

_LIGHT = MappingProxyType(
    {
        "paper": "#ffffff",
        "rule": "#d0d7de",
        "ink": "#1f2328",
        "faint": "#57606a",
        "branch": "#c4ccd5",
        "plain": "#f3f5f7",
        "plain-edge": "#6e7781",
        "locked": "#fff0e0",
        "locked-edge": "#b54708",
        "pinned": "#f4ecfb",
        "pinned-edge": "#7b3fb5",
        "evictable": "#e8f3fd",
        "evictable-edge": "#0b69b7",
    }
)
_DARK = MappingProxyType(
    {
        "paper": "#0d1117",
        "rule": "#30363d",
        "ink": "#e6edf3",
        "faint": "#9da7b3",
        "branch": "#3d4653",
        "plain": "#1c2128",
        "plain-edge": "#8b949e",
        "locked": "#3b2410",
        "locked-edge": "#f2974a",
        "pinned": "#2c1d42",
        "pinned-edge": "#c294f7",
        "evictable": "#0f2a45",
        "evictable-edge": "#5aa9f5",
    }
)
_RULES = (
    (".rj-paper", "fill", "paper"),
    (".rj-paper", "stroke", "rule"),
    (".rj-tree text", "fill", "ink"),
    (".rj-tree .rj-faint", "fill", "faint"),
    (".rj-branch", "stroke", "branch"),
    (".rj-plain", "fill", "plain"),
    (".rj-plain", "stroke", "plain-edge"),
    (".rj-hidden", "fill", "paper"),
    (".rj-hidden", "stroke", "plain-edge"),
    (".rj-locked", "fill", "locked"),
    (".rj-locked", "stroke", "locked-edge"),
    (".rj-pinned", "fill", "pinned"),
    (".rj-pinned", "stroke", "pinned-edge"),
    (".rj-evictable", "fill", "evictable"),
    (".rj-evictable", "stroke", "evictable-edge"),
    (".rj-held", "stroke", "locked-edge"),
    (".rj-padlock", "fill", "locked-edge"),
    (".rj-shackle", "stroke", "locked-edge"),
    (".rj-tree .rj-locks", "fill", "locked-edge"),
    (".rj-pin", "fill", "pinned-edge"),
    (".rj-needle", "stroke", "pinned-edge"),
    (".rj-tree .rj-pins", "fill", "pinned-edge"),
    (".rj-badge", "fill", "ink"),
    (".rj-tree .rj-inverse", "fill", "paper"),
    (".rj-private", "fill", "faint"),
    (".rj-private", "stroke", "faint"),
)
_SHAPES = """\
.rj-tree text{white-space:pre;font:11px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",Arial,sans-serif}
.rj-tree .rj-title{font-size:15px;font-weight:600}
.rj-tree .rj-label{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.rj-tree .rj-cell{font-size:10px;text-anchor:middle}
.rj-tree .rj-cell.rj-inverse{font-weight:600}
.rj-tree .rj-bold{font-weight:600}
.rj-branch,.rj-held,.rj-shackle{fill:none}
.rj-plain,.rj-evictable{stroke-width:1}
.rj-pinned{stroke-width:1.5}
.rj-locked{stroke-width:2.5}
.rj-hidden{stroke-dasharray:4 3}
.rj-tail{stroke-dasharray:1.5 2}
"""


def svg_css() -> str:
    """Style sheet of an SVG drawing. Every rule starts with a class of ours, since it may end up in another's page."""
    return f"{_SHAPES}{_colours(_LIGHT)}@media (prefers-color-scheme:dark){{\n{_colours(_DARK)}}}\n"


def page_css_colours() -> str:
    """The same colours as variables of an HTML page."""
    light, dark = (";".join(f"--{name}:{colour}" for name, colour in theme.items()) for theme in (_LIGHT, _DARK))
    return f":root{{color-scheme:light dark;{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _colours(theme: Mapping[str, str]) -> str:
    return "".join(f"{selector}{{{attribute}:{theme[name]}}}\n" for selector, attribute, name in _RULES)
