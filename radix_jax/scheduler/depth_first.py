"""The order of dfs-weight: waiting requests as they hang in the tree, depth first, heavy subtrees first."""

from collections.abc import Iterable
from typing import NamedTuple

from radix_jax.cache.node import RadixTreeNode
from radix_jax.cache.peek import Peek


class Hanging(NamedTuple):
    """A request in the tree. peek: where its match ends, followed to now. arrival, number: in case of ties."""

    peek: Peek
    arrival: int
    number: int


def depth_first_order(requests: Iterable[Hanging]) -> list[int]:
    """Numbers of the requests in the order of dfs-weight.

    The weight of a node is how many of the requests have matched a prefix that ends in its subtree. Depth first:
    children by descending weight, then the requests whose match ends at the node itself, by arrival. Of children of
    one weight that with the earliest arrival goes first. A match may end inside a node: it counts as if the node were
    split there. The namespaces hang from one root, so what matches nothing goes last.

    Looks at no node but those that lead to a match, and compares no tokens.
    """
    own: dict[RadixTreeNode, list[Hanging]] = {}
    unmatched: list[Hanging] = []
    for request in requests:
        if request.peek.cached_len:
            own.setdefault(request.peek.node, []).append(request)
        else:
            unmatched.append(request)
    tops, children = _subtrees(own)
    ranks = _ranks(tops, children, own)
    order: list[int] = []
    stack: list[RadixTreeNode | list[Hanging]] = [*sorted(tops, key=ranks.__getitem__, reverse=True)]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            order.extend(request.number for request in node)
            continue
        if node in own:
            # Behind the children, since the stack is taken from its end; the longer of two matches in one node first.
            stack.append(sorted(own[node], key=lambda each: (-each.peek.cached_len, each.arrival, each.number)))
        stack.extend(sorted(children.get(node, ()), key=ranks.__getitem__, reverse=True))
    order.extend(request.number for request in sorted(unmatched, key=lambda each: (each.arrival, each.number)))
    return order


def _subtrees(
    ends: Iterable[RadixTreeNode],
) -> tuple[list[RadixTreeNode], dict[RadixTreeNode, list[RadixTreeNode]]]:
    """The nodes that lead to `ends`: those below a root, and the children of each."""
    tops: list[RadixTreeNode] = []
    children: dict[RadixTreeNode, list[RadixTreeNode]] = {}
    seen: set[RadixTreeNode] = set()
    for node in ends:
        while node not in seen:
            seen.add(node)
            parent = node.parent
            assert parent is not None, "a match of some length ends below a root"
            if parent.parent is None:
                tops.append(node)
                break
            children.setdefault(parent, []).append(node)
            node = parent
    return tops, children


def _ranks(
    tops: list[RadixTreeNode],
    children: dict[RadixTreeNode, list[RadixTreeNode]],
    own: dict[RadixTreeNode, list[Hanging]],
) -> dict[RadixTreeNode, tuple[int, int]]:
    """For each node (-weight, earliest arrival) of its subtree."""
    from_above = list(tops)
    for node in from_above:
        from_above.extend(children.get(node, ()))
    ranks: dict[RadixTreeNode, tuple[int, int]] = {}
    for node in reversed(from_above):
        below = [ranks[child] for child in children.get(node, ())]
        here = own.get(node, ())
        weight = sum(rank[0] for rank in below) - len(here)
        ranks[node] = (weight, min([rank[1] for rank in below] + [request.arrival for request in here]))
    return ranks
