"""A tree as the value of a notebook cell."""

from dataclasses import dataclass

from radix_jax.viz.labels import Decode
from radix_jax.viz.snapshot import TreeSnapshot
from radix_jax.viz.svg import render_svg
from radix_jax.viz.text import render_text


@dataclass(frozen=True, eq=False, repr=False)
class TreeView:
    """Shown as a drawing by a notebook, as text by a terminal. decode, max_nodes, max_depth: as for `render_svg`."""

    snapshot: TreeSnapshot
    decode: Decode | None = None
    max_nodes: int = 40
    max_depth: int = 6

    def __repr__(self) -> str:
        """The tree as text."""
        return render_text(self.snapshot, self.decode, self.max_nodes)

    def _repr_html_(self) -> str:
        """The drawing, which scrolls where it is wider than the notebook."""
        svg = render_svg(self.snapshot, self.decode, self.max_nodes, self.max_depth)
        return f'<div style="overflow-x:auto">\n{svg}</div>\n'
