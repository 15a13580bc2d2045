"""A TreeSnapshot as lines of text."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from radix_jax.viz.snapshot import NodeSnapshot, TreeSnapshot

Decode = Callable[[Sequence[int]], str]
Children = Mapping[int | None, Sequence[NodeSnapshot]]

_INDENT = 3  # columns a level
_LABEL_ROOM = 12  # columns kept for a node's tokens at the greatest depth drawn
_FACTS_ROOM = 44  # columns kept for its counts
_MIN_WIDTH = 80


def render_text(snapshot: TreeSnapshot, decode: Decode | None = None, max_nodes: int = 40, width: int = 100) -> str:
    """Draw the tree: a header with totals, then for each node its tokens, how many, pages, locks and hits.

    decode: token ids -> text; without it the ids are shown. max_nodes: nodes drawn at most, those with the most tokens
    at and below them first. width: columns of a node's line, at least 80; it also bounds the depth that is drawn. What
    is left out under a node is summed up in one line.

    Raises:
        ValueError: max_nodes below 1, or width below 80.
    """
    if max_nodes < 1 or width < _MIN_WIDTH:
        raise ValueError(f"max_nodes={max_nodes} must be at least 1, and width={width} at least {_MIN_WIDTH}")
    children: dict[int | None, list[NodeSnapshot]] = defaultdict(list)
    for node in snapshot.nodes:
        children[node.parent_id].append(node)
    weights = _subtree_lens(snapshot)
    shown = _choose(children, weights, max_nodes, max_depth=(width - _FACTS_ROOM - _LABEL_ROOM) // _INDENT)
    return "\n".join([_header(snapshot), *_lines(children, weights, shown, decode, width)])


def _header(snapshot: TreeSnapshot) -> str:
    num_nodes = sum(node.state != "root" for node in snapshot.nodes)
    num_tokens, num_locked = snapshot.num_tokens, snapshot.num_locked_tokens
    return (
        f"radix tree · page size {snapshot.page_size} · {_count(num_nodes, 'node')} · "
        f"{_count(num_tokens, 'token')} ({num_locked:,} locked, {num_tokens - num_locked:,} evictable)"
    )


def _subtree_lens(snapshot: TreeSnapshot) -> Counter[int | None]:
    """Tokens at and below each node, by its id."""
    weights: Counter[int | None] = Counter()
    for node in reversed(snapshot.nodes):
        weights[node.node_id] += len(node.token_ids)
        weights[node.parent_id] += weights[node.node_id]
    return weights


def _choose(children: Children, weights: Mapping[int | None, int], max_nodes: int, max_depth: int) -> set[int]:
    """Ids of the nodes to draw: from the roots on, always the node with the most tokens at and below it."""
    shown: set[int] = set()
    frontier = [(-weights[node.node_id], node.node_id, node) for node in children.get(None, ())]
    heapq.heapify(frontier)
    while frontier and len(shown) < max_nodes:
        _, node_id, node = heapq.heappop(frontier)
        shown.add(node_id)
        if node.depth < max_depth:
            for child in children.get(node_id, ()):
                heapq.heappush(frontier, (-weights[child.node_id], child.node_id, child))
    return shown


def _lines(
    children: Children, weights: Mapping[int | None, int], shown: set[int], decode: Decode | None, width: int
) -> list[str]:
    lines: list[str] = []
    stack: list[tuple[str, str, NodeSnapshot | str]] = _entries(None, "", children, weights, shown)
    while stack:
        prefix, branch, node = stack.pop()
        if isinstance(node, str):
            lines.append(f"{prefix}{branch}{node}")
            continue
        lines.append(_node_line(node, prefix + branch, decode, width))
        below = prefix + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        stack.extend(_entries(node.node_id, below, children, weights, shown))
    return lines


def _entries(
    parent_id: int | None, prefix: str, children: Children, weights: Mapping[int | None, int], shown: set[int]
) -> list[tuple[str, str, NodeSnapshot | str]]:
    """(prefix, branch, node or summary) of what is drawn under a parent, last one first."""
    all_children = children.get(parent_id, ())
    drawn: list[NodeSnapshot | str] = [node for node in all_children if node.node_id in shown]
    hidden = [node for node in all_children if node.node_id not in shown]
    if hidden:
        what = ("namespace", "namespaces") if parent_id is None else ("child", "children")
        num_tokens = sum(weights[node.node_id] for node in hidden)
        drawn.append(f"… {len(hidden):,} more {what[len(hidden) > 1]}, {_count(num_tokens, 'token')}")
    branches = [""] * len(drawn) if parent_id is None else ["├─ "] * (len(drawn) - 1) + ["└─ "]
    return [(prefix, branch, node) for branch, node in zip(branches, drawn, strict=False)][::-1]


def _node_line(node: NodeSnapshot, indent: str, decode: Decode | None, width: int) -> str:
    if node.state == "root":
        label = "root" if node.namespace is None else f"namespace {node.namespace!r}"
        return label if len(label) <= width else f"{label[: width - 1]}…"
    facts = " · ".join(
        [
            _count(len(node.token_ids), "token"),
            _count(len(node.page_ids), "page"),
            _count(node.num_locks, "lock"),
            _count(node.num_hits, "hit"),
        ]
    )
    room = max(width - len(indent) - len(facts) - 3, 1)
    return f"{indent}{_label(node, decode, room)} · {facts}"


def _label(node: NodeSnapshot, decode: Decode | None, room: int) -> str:
    """The node's tokens in at most `room` columns; unprintable characters are escaped."""
    head = node.token_ids[:room].tolist()  # a token takes a column or more, nearly always
    is_cut = len(head) < len(node.token_ids)
    text = " ".join(map(str, head)) if decode is None else repr(decode(head))
    if len(text) > room or is_cut:
        text = f"{text[: room - 1]}…"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
