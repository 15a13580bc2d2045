"""A TreeSnapshot as lines of text."""

from radix_jax.viz.labels import Decode, count, root_label, tails_label, token_label, totals
from radix_jax.viz.outline import Hidden, Outline, Tails
from radix_jax.viz.snapshot import NodeSnapshot, TreeSnapshot

_INDENT = 3  # columns a level
_LABEL_ROOM = 12  # columns kept for a node's tokens at the greatest depth drawn
_FACTS_ROOM = 44  # columns kept for its counts
_MIN_WIDTH = 80


def render_text(snapshot: TreeSnapshot, decode: Decode | None = None, max_nodes: int = 40, width: int = 100) -> str:
    """Draw the tree: a header with totals, then for each node its tokens, how many, pages, locks, hits and pins, and
    in a line of their own the tails under it.

    decode: token ids -> text; without it the ids are shown. max_nodes: nodes drawn at most, those with the most tokens
    at and below them first, up to six children of a node before any further ones. width: columns of a node's line, at
    least 80; it also bounds the depth that is drawn. What is left out under a node is summed up in one line.

    Raises:
        ValueError: max_nodes below 1, or width below 80.
    """
    if max_nodes < 1 or width < _MIN_WIDTH:
        raise ValueError(f"max_nodes={max_nodes} must be at least 1, and width={width} at least {_MIN_WIDTH}")
    outline = Outline(snapshot, max_nodes, max_depth=(width - _FACTS_ROOM - _LABEL_ROOM) // _INDENT)
    return "\n".join([f"radix tree · {totals(snapshot)}", *_lines(outline, decode, width)])


def _lines(outline: Outline, decode: Decode | None, width: int) -> list[str]:
    lines: list[str] = []
    stack: list[tuple[str, str, NodeSnapshot | Tails | str]] = _entries(outline, None, "")
    while stack:
        prefix, branch, node = stack.pop()
        if isinstance(node, Tails):
            node = tails_label(node.tails, node.is_lost, decode, max(width - len(prefix + branch), 1))
        if isinstance(node, str):
            lines.append(f"{prefix}{branch}{node}")
            continue
        lines.append(_node_line(node, prefix + branch, decode, width))
        below = prefix + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        stack.extend(_entries(outline, node.node_id, below))
    return lines


def _entries(outline: Outline, parent_id: int | None, prefix: str) -> list[tuple[str, str, NodeSnapshot | Tails | str]]:
    """(prefix, branch, node, tails or summary) of what is drawn under a parent, last one first."""
    drawn: list[NodeSnapshot | Tails | str] = [*outline.children(parent_id)]
    hidden, tails = outline.hidden(parent_id), outline.tails(parent_id)
    if hidden is not None:
        drawn.append(_summary(hidden, of_roots=parent_id is None))
    if tails is not None:
        drawn.append(tails)
    branches = [""] * len(drawn) if parent_id is None else ["├─ "] * (len(drawn) - 1) + ["└─ "]
    return [(prefix, branch, node) for branch, node in zip(branches, drawn, strict=False)][::-1]


def _summary(hidden: Hidden, of_roots: bool) -> str:
    what = ("namespace", "namespaces") if of_roots else ("child", "children")
    return f"… {hidden.num_children:,} more {what[hidden.num_children > 1]}, {count(hidden.num_tokens, 'token')}"


def _node_line(node: NodeSnapshot, indent: str, decode: Decode | None, width: int) -> str:
    if node.state == "root":
        return root_label(node, width)
    parts = [
        count(len(node.token_ids), "token"),
        count(len(node.page_ids), "page"),
        count(node.num_locks, "lock"),
        count(node.num_hits, "hit"),
    ]
    if node.num_pins:
        parts.append(count(node.num_pins, "pin"))
    facts = " · ".join(parts)
    room = max(width - len(indent) - len(facts) - 3, 1)
    return f"{indent}{token_label(node, decode, room)} · {facts}"
