"""PagePool: who is free, and what it refuses."""

import numpy as np
import pytest

from radix_jax.cache import IntegrityError, OutOfPages, PagePool


def test_a_fresh_pool_gives_its_lowest_pages_and_never_the_null_page():
    pool = PagePool(8)
    assert (pool.num_pages, pool.num_free) == (8, 7)
    first, rest = pool.allocate(3), pool.allocate(4)
    assert (first.tolist(), rest.tolist()) == ([1, 2, 3], [4, 5, 6, 7])
    assert first.dtype == np.int32
    assert pool.num_free == 0
    assert len(pool.allocate(0)) == 0
    pool.check_integrity()


def test_too_few_takes_nothing():
    pool = PagePool(4)
    pool.allocate(1)
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(2).tolist() == [2, 3]
    with pytest.raises(ValueError, match="negative"):
        pool.allocate(-1)


def test_pages_freed_last_come_first_and_in_their_order():
    pool = PagePool(8)
    pool.allocate(7)
    pool.free([2, 5])
    pool.free(np.array([7, 1], np.int32))
    assert pool.allocate(4).tolist() == [7, 1, 2, 5]
    pool.free([])
    assert pool.num_free == 0


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1, 5], r"pages \[5\] are freed twice"),
        ([1, 2, 1], r"pages \[1\] are freed twice"),
        ([1, 0], "null page"),
        ([1, 8], r"pages \[8\] are outside the pool's pages 1 to 7"),
        ([1, -1], r"pages \[-1\] are outside"),
        ([2**40], "must fit int32"),
    ],
)
def test_a_wrong_free_frees_nothing(pages: list[int], message: str):
    pool = PagePool(8)
    pool.allocate(4)
    with pytest.raises(ValueError, match=message):
        pool.free(pages)
    assert pool.num_free == 3
    pool.check_integrity()
    pool.free([4, 3, 2, 1])
    assert pool.num_free == 7


def test_a_negative_page_does_not_count_from_the_end():
    pool = PagePool(8)
    pool.allocate(7)
    with pytest.raises(ValueError, match=r"pages \[-1\] are outside"):
        pool.free([-1])
    assert pool.num_free == 0


def test_integrity_check_sees_a_damaged_list():
    pool = PagePool(8)
    pool.allocate(2)
    pool._stack[0] = 3
    with pytest.raises(IntegrityError, match=r"pages \[3\] are listed as free twice"):
        pool.check_integrity()
    pool._stack[0] = 1
    with pytest.raises(IntegrityError, match=r"pages \[1, 7\] are free in only one of list and mask"):
        pool.check_integrity()


def test_a_pool_holds_a_page_beside_the_null_page():
    with pytest.raises(ValueError, match="num_pages=1"):
        PagePool(1)
