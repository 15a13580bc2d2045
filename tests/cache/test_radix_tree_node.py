"""RadixTreeNode by itself: links, lengths and splits."""

import itertools

import numpy as np
import pytest

from radix_jax.cache import RadixTreeNode


def make_node(ids: list[int], pages: list[int], page_size: int = 1) -> tuple[RadixTreeNode, RadixTreeNode]:
    """A root and its only child."""
    uuids = itertools.count()

    def first_page(edge: bytes) -> bytes:
        return edge[: 4 * page_size]

    root, node = RadixTreeNode(first_page, uuids), RadixTreeNode(first_page, uuids)
    node.set_key_value(ids, pages)
    node.set_parent(root)
    return root, node


def test_split_moves_key_and_pages_between_two_nodes():
    root, node = make_node([1, 2, 3, 4, 5, 6], [7, 8, 9], page_size=2)
    node.ref_count, node.hits, node.priority, node.timestamp, node.num_pins = 3, 4, 5, 6, 7
    front = node.split_at(4)
    assert (front.key.tolist(), front.value.tolist()) == ([1, 2, 3, 4], [7, 8])
    assert (node.key.tolist(), node.value.tolist()) == ([5, 6], [9])
    assert (front.length, node.length) == (4, 2)
    assert list(root.children.values()) == [front]
    assert list(front.children.values()) == [node]
    assert (front.parent, node.parent) == (root, front)
    assert (front.ref_count, front.hits, front.priority, front.timestamp, front.num_pins) == (3, 4, 5, 6, 7)
    assert (front.created, front.end_len, node.end_len) == (node.created, 4, 6)
    assert front.uuid > node.uuid > root.uuid
    assert (root.is_root(), front.is_root(), front.is_leaf(), node.is_leaf()) == (True, False, False, True)


def test_a_split_keeps_the_children_of_the_rear_part():
    _, node = make_node([1, 2, 3], [1, 2, 3])
    child = RadixTreeNode(node.key_fn, itertools.count(10))
    child.set_key_value([4], [4])
    child.set_parent(node)
    front = node.split_at(1)
    assert child.parent is node
    assert list(node.children.values()) == [child]
    assert list(front.children.values()) == [node]


def test_a_split_does_not_keep_the_whole_value_alive():
    _, node = make_node(list(range(1_000)), list(range(1_000)))
    front = node.split_at(1)
    assert (len(front.pages), len(front.edge)) == (4, 4)
    assert (len(node.pages), len(node.edge)) == (3_996, 3_996)


def test_a_leaf_is_trimmed_from_its_end():
    _, node = make_node([1, 2, 3, 4, 5, 6], [7, 8, 9], page_size=2)
    assert np.frombuffer(node.trim_to(2), np.int32).tolist() == [8, 9]
    assert (node.key.tolist(), node.value.tolist(), node.end_len, node.reach_len) == ([1, 2], [7], 2, 6)
    with pytest.raises(ValueError, match="can't split a node of 2 tokens at 2"):
        node.trim_to(2)
    node.add_child(np.array([5, 6], np.int32).tobytes(), np.array([9], np.int32).tobytes())
    node.set_key_value([1, 2, 3, 4], [7, 8])
    with pytest.raises(ValueError, match="with 1 children"):
        node.trim_to(2)


@pytest.mark.parametrize("pos", [-2, 0, 1, 3, 4, 6])
def test_a_split_off_a_page_border_is_refused(pos: int):
    root, node = make_node([1, 2, 3, 4], [7, 8], page_size=2)
    with pytest.raises(ValueError, match=f"can't split a node of 4 tokens at {pos}.*page_size=2"):
        node.split_at(pos)
    with pytest.raises(ValueError, match="with a parent"):
        root.split_at(2)
    assert node.length == 4


def test_key_and_value_must_agree():
    _, node = make_node([1], [1])
    for ids, pages in (([1, 2, 3], [1, 2]), ([1, 2], []), ([], [1]), ([], [])):
        with pytest.raises(ValueError, match=f"a node of {len(ids)} tokens can't have {len(pages)} full pages"):
            node.set_key_value(ids, pages)


@pytest.mark.parametrize("place", [0, 1, 4_095, 4_096, 4_097, 20_479, 20_480, 29_999])
def test_get_match_len_finds_the_first_difference(place: int):
    ids = np.arange(30_000, dtype=np.int32)
    _, node = make_node(ids.tolist(), ids.tolist())
    other = ids.copy()
    other[place] = -1
    assert node.get_match_len(other) == place
    assert node.get_match_len(ids[:place]) == place
    assert node.get_match_len(np.concatenate([ids, ids])) == 30_000
