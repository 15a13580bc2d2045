"""Keys that look alike to a weak comparison are different keys."""

import numpy as np
import pytest

from radix_jax.cache import RadixTree


@pytest.mark.parametrize(
    ("cached", "looked_up"),
    [
        pytest.param([300, 301, 302, 303], [44, 45, 46, 47], id="equal mod 256"),
        pytest.param([70_000, 1, 2, 3], [4_464, 1, 2, 3], id="equal mod 65,536"),
        pytest.param([1, 23], [12, 3], id="equal as joined decimal text"),
        pytest.param([1, 2, 3, 4], [12, 34], id="equal as joined decimal text, other length"),
        pytest.param([-1, 5], [-2, 5], id="equal Python hashes"),
        pytest.param([1, 0], [0, 1], id="equal sums"),
        pytest.param([0x01020304], [0x04030201], id="bytes swapped"),
        pytest.param([256, 0], [1, 0], id="bytes shifted over the token border"),
    ],
)
@pytest.mark.parametrize("page_size", [1, 2])
def test_look_alikes_do_not_match(cached: list[int], looked_up: list[int], page_size: int):
    tree = RadixTree(page_size=page_size)
    tree.insert_prefix(cached * 2, range(1, 1 + len(cached) * 2 // page_size))
    assert tree.match_prefix(cached * 2).cached_len == len(cached) * 2
    assert tree.match_len(looked_up * 2) == 0
    assert tree.match_prefix(looked_up * 2).cached_len == 0


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**32 + 5, 2**63, 2**70])
@pytest.mark.parametrize("as_array", [False, True])
def test_ids_outside_int32_are_refused_not_wrapped(token: int, as_array: bool):
    tree = RadixTree(page_size=1)
    tree.insert_prefix([5, 6], [1, 2])
    ids = np.array([token, 6]) if as_array else [token, 6]
    with pytest.raises(ValueError, match="int32"):
        tree.match_prefix(ids)
    with pytest.raises(ValueError, match="int32"):
        tree.match_len(ids)
    with pytest.raises(ValueError, match="int32"):
        tree.insert_prefix(ids, [3, 4])
    assert tree.total_size == 2


def test_other_integer_types_match_by_value():
    tree = RadixTree(page_size=1)
    tree.insert_prefix(np.array([5, 6], np.int64), [1, 2])
    for dtype in (np.uint8, np.int16, np.int32, np.int64, np.dtype(">i4")):
        assert tree.match_len(np.array([5, 6, 7], dtype)) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "bc"), ("ab", "c")),
        ("a", ("a",)),
        (1, True),
        (1, 1.0),
        (0, False),
        (("salt", 1), ("salt", True)),
        (("salt", (0,)), ("salt", (False,))),
        (frozenset([1]), frozenset([True])),
        ("1", 1),
        (b"a", "a"),
        (None, "None"),
        (None, ()),
        (-1, -2),
    ],
)
def test_namespaces_that_look_alike_share_nothing(one, other):
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1, 2], [1, 2], namespace=one)
    assert tree.match_len([1, 2], namespace=other) == 0
    tree.insert_prefix([1, 2], [3, 4], namespace=other)
    assert tree.match_prefix([1, 2], namespace=one).pages.tolist() == [1, 2]
    assert tree.match_prefix([1, 2], namespace=other).pages.tolist() == [3, 4]
    tree.check_integrity()
