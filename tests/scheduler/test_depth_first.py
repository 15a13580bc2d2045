"""The order of dfs-weight in trees made by hand, each worked out by hand."""

import itertools

from radix_jax.cache.radix_tree import RadixTree
from radix_jax.scheduler.depth_first import Hanging, depth_first_order


def tree_of(*prefixes: str) -> RadixTree:
    """A tree of one letter a page."""
    tree, pages = RadixTree(1), itertools.count()
    for prefix in prefixes:
        tree.insert_prefix([ord(letter) for letter in prefix], [next(pages) for _ in prefix])
    return tree


def hanging(tree: RadixTree, *prompts: str, namespaces: dict[int, str] | None = None) -> list[Hanging]:
    """The prompts in their order of arrival; a request's number is its arrival."""
    peeks = [
        tree.peek([ord(letter) for letter in prompt], (namespaces or {}).get(i)) for i, prompt in enumerate(prompts)
    ]
    return [Hanging(peek, i, i) for i, peek in enumerate(peeks)]


def test_heavy_subtrees_go_first_and_a_nodes_own_requests_after_its_children() -> None:
    tree = tree_of("abc", "abd", "xy")
    # Weights: a 5 (ab 4, of which abc 1 and abd 2), x 1.
    requests = hanging(tree, "xyz", "a..", "ab.", "abc.", "abd.", "abd", "q")
    assert depth_first_order(requests) == [4, 5, 3, 2, 1, 0, 6]


def test_of_equal_weights_the_earliest_arrival_goes_first() -> None:
    tree = tree_of("ab", "ac", "x", "y")
    # x and y weigh 1 each, ab and ac 2 each, their arrivals are 3 and 0.
    requests = hanging(tree, "ac1", "y1", "x1", "ab1", "ab2", "ac2")
    assert depth_first_order(requests) == [0, 5, 3, 4, 1, 2]
    # What ties a subtree is its earliest request anywhere below.
    requests = hanging(tree, "x1", "ac1", "x2", "ab1")
    assert depth_first_order(requests) == [0, 2, 1, 3]


def test_a_match_may_end_inside_a_node() -> None:
    tree = tree_of("abcdef")
    requests = hanging(tree, "ab.", "abcd.", "a.", "abcdef.", "abcd!")
    assert depth_first_order(requests) == [3, 1, 4, 0, 2]
    # Splits change nothing.
    tree.match_prefix([ord(letter) for letter in "abcd"])
    tree.match_prefix([ord("a")])
    followed = [request._replace(peek=peek) for request in requests if (peek := request.peek.followed())]
    assert depth_first_order(followed) == [3, 1, 4, 0, 2]


def test_namespaces_hang_from_one_root() -> None:
    tree = tree_of("a", "b")
    tree.insert_prefix([ord("a")], [100], namespace="other")
    requests = hanging(tree, "b1", "a1", "a2", "a3", "zz", "zz", namespaces={1: "other", 2: "other", 5: "nowhere"})
    assert depth_first_order(requests) == [1, 2, 0, 3, 4, 5]


def test_depth_is_no_limit() -> None:
    tree = RadixTree(1)
    ids = list(range(1_500))
    requests = []
    for length in range(1, 1_501):
        tree.insert_prefix(ids[:length], range(length))
    for length in range(1, 1_501, 10):
        requests.append(Hanging(tree.peek(ids[:length]), length, length))
    assert depth_first_order(requests) == list(range(1_491, 0, -10))


def test_nothing_waits() -> None:
    assert depth_first_order([]) == []
