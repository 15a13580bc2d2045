"""Donors: the cached page that goes on the furthest where whole pages end, token by token."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_jax.cache import HandleError, RadixTree
from radix_jax.cache.donor import MAX_CANDIDATES, longest_beginning


def common_len(a, b) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_the_next_page_of_a_partly_matched_edge():
    tree = RadixTree(page_size=4)
    tree.insert_prefix(list(range(12)), [1, 2, 3])
    match = tree.match_prefix([0, 1, 2, 3, 4, 5, 6, 99, 8])
    assert (match.cached_len, match.pages.tolist()) == (4, [1])
    assert (match.donor_page, match.donor_len) == (2, 3)
    tree.check_integrity()


def test_the_child_that_goes_on_the_furthest():
    tree = RadixTree(page_size=4)
    for place, page in enumerate(([7, 1, 1, 1], [7, 8, 9, 1], [7, 8, 1, 1], [6, 8, 9, 9])):
        tree.insert_prefix([0, 0, 0, 0, *page], [50, place + 1])
    found = [tree.match_prefix([0, 0, 0, 0, *ids]) for ids in ([7, 8, 9], [7, 8, 1, 2], [7, 2], [7, 8, 9, 9], [5])]
    assert [(match.donor_page, match.donor_len) for match in found] == [(2, 3), (3, 3), (3, 1), (2, 3), (None, 0)]
    assert found[-1].donor_handle is None
    assert {match.cached_len for match in found} == {4}


def test_without_a_whole_page_the_donor_is_at_the_root_of_its_namespace():
    tree = RadixTree(page_size=4)
    tree.insert_prefix([1, 2, 3, 4], [9], namespace="a")
    match = tree.match_prefix([1, 2, 7], namespace="a")
    assert (match.cached_len, match.donor_page, match.donor_len) == (0, 9, 2)
    for namespace in (None, "b", ("a",)):
        assert tree.match_prefix([1, 2, 7], namespace=namespace).donor_handle is None
    assert tree.match_prefix([], namespace="a").donor_len == 0


def test_ids_are_compared_whole():
    """256 and 0 share a byte with 512 and 65536, and no token."""
    tree = RadixTree(page_size=2)
    tree.insert_prefix([256, 5], [1])
    for first in (0, 512, 65536, 65536 + 256):
        assert tree.match_prefix([first, 9]).donor_len == 0
    assert tree.match_prefix([256, 9]).donor_len == 1


def test_a_lock_keeps_the_donor_and_no_more_than_its_edge():
    tree = RadixTree(page_size=2)
    tree.insert_prefix([0, 1, 2, 3], [1, 2])
    tree.insert_prefix([0, 1, 2, 3, 4, 5], [1, 2, 3])
    match = tree.match_prefix([0, 1, 2, 9])
    assert (match.donor_page, match.donor_len) == (2, 1)
    assert match.donor_handle is not None
    tree.lock(match.donor_handle)
    assert tree.protected_size == 4
    assert tree.evict(100).tolist() == [3]
    # A later match splits nothing off: the donor's edge is one page by now; a longer one splits in front of its end.
    assert tree.match_prefix([0, 1, 2, 3]).cached_len == 4
    tree.unlock(match.donor_handle)
    assert sorted(tree.evict(100).tolist()) == [1, 2]
    with pytest.raises(HandleError, match="evicted"):
        tree.lock(match.donor_handle)


def test_a_locked_donor_may_be_split():
    tree = RadixTree(page_size=2)
    tree.insert_prefix(list(range(10)), [1, 2, 3, 4, 5])
    donor = tree.match_prefix([0, 99]).donor_handle
    assert donor is not None
    tree.lock(donor)
    match = tree.match_prefix(list(range(4)))
    tree.insert_prefix([0, 1, 2, 3, 50, 51], [1, 2, 6])
    assert tree.evict(100).tolist() == [6]
    tree.unlock(donor)
    tree.check_integrity()
    assert match.cached_len == 4
    assert len(tree.evict(100)) == 5


def test_looking_for_donors_counts_no_hit_and_splits_nothing():
    tree = RadixTree(page_size=4)
    tree.insert_prefix(list(range(12)), [1, 2, 3])
    before, version = tree.render(), tree.version
    assert tree.match_prefix([0, 1, 2]).donor_len == 3
    assert (tree.render(), tree.version) == (before, version)


def test_off_and_page_size_1_have_none():
    for tree in (RadixTree(page_size=4, partial_pages=False), RadixTree(page_size=1)):
        assert not tree.partial_pages
        tree.insert_prefix(list(range(8)), range(1, 8 // tree.page_size + 1))
        match = tree.match_prefix([0, 1, 2])
        assert (match.donor_page, match.donor_len, match.donor_handle) == (None, 0, None)
    assert RadixTree(page_size=2).partial_pages


def test_only_the_newest_candidates_are_looked_at():
    tree = RadixTree(page_size=2)
    for token in range(MAX_CANDIDATES + 1):
        tree.insert_prefix([token, 0], [token + 1])
    assert tree.match_prefix([0, 9]).donor_len == 0
    assert tree.match_prefix([1, 9]).donor_page == 2
    assert longest_beginning([b"abcdefgh", b"abcdefgx"], b"abcdefgx") == (b"abcdefgx", 2)


@settings(max_examples=80)
@given(data=st.data(), page_size=st.sampled_from((2, 4, 16)))
def test_matches_reach_as_far_as_anything_cached_does(data: st.DataObject, page_size: int):
    """Against a dict of all cached pages by the ids in front of and in them."""
    tree, cached, num_pages = RadixTree(page_size), {}, itertools.count(1)
    ids_of = st.lists(st.integers(0, 1), max_size=4 * page_size)
    held = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(("insert", "match", "match", "evict", "unlock")))
        namespace = data.draw(st.sampled_from((None, "a")))
        ids = data.draw(ids_of)
        if action == "insert":
            ends = range(page_size, len(ids) + 1, page_size)
            pages = [cached.get((namespace, tuple(ids[:end]))) or next(num_pages) for end in ends]
            tree.insert_prefix(ids, pages, namespace)
            cached |= {(namespace, tuple(ids[:end])): page for end, page in zip(ends, pages, strict=True)}
        elif action == "match":
            match = tree.match_prefix(np.array(ids, np.int32), namespace)
            shared_len = max((common_len(key, ids) for space, key in cached if space == namespace), default=0)
            assert match.cached_len + match.donor_len == shared_len
            assert match.donor_len < page_size
            if match.donor_handle is not None:
                [donor] = [key for (_, key), page in cached.items() if page == match.donor_page]
                assert len(donor) == match.cached_len + page_size
                assert list(donor[:shared_len]) == ids[:shared_len]
                tree.lock(match.donor_handle)
                held.append((match.donor_handle, match.donor_page))
        elif action == "evict":
            gone = set(tree.evict(data.draw(st.integers(0, 3 * page_size))).tolist())
            assert not gone & {page for _, page in held}
            cached = {key: page for key, page in cached.items() if page not in gone}
        elif held:
            tree.unlock(held.pop()[0])
        tree.check_integrity()
        assert sorted(cached.values()) == sorted(tree.owned_pages().tolist())
