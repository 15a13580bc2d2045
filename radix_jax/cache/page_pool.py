"""PagePool: which pages are free. It knows ids only, never what is in a page."""

import numpy as np
from jaxtyping import Bool, Int32

from radix_jax.cache.errors import IntegrityError, OutOfPages
from radix_jax.cache.keys import TokenIds, to_int32
from radix_jax.config import check_int


class PagePool:
    """Free list over pages 1 .. num_pages - 1; page 0 is the null page, which padding reads and nobody owns.

    A fresh pool gives its lowest ids first; later the pages freed last come first, in the order they were freed in.

    Raises:
        ValueError: num_pages below 2.
    """

    def __init__(self, num_pages: int) -> None:
        check_int("num_pages", num_pages, at_least=2)
        self._num_pages = num_pages
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # the next page is at [num_free - 1]
        self._num_free = num_pages - 1
        self._is_free = np.ones(num_pages, bool)  # the null page counts as free, so that it can't be freed
        self._generation = np.zeros(num_pages, np.int64)
        self._place = np.empty(num_pages, np.int32)  # scratch that finds an id given twice

    @property
    def num_pages(self) -> int:
        """All pages, the null page included."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give."""
        return self._num_free

    def allocate(self, num_pages: int) -> Int32[np.ndarray, " P"]:
        """Take `num_pages` pages.

        Raises:
            OutOfPages: fewer are free; nothing is taken.
            ValueError: `num_pages` is negative.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages={num_pages} to allocate is negative")
        if num_pages > self._num_free:
            raise OutOfPages(f"{num_pages} pages asked for, {self._num_free} of {self._num_pages - 1} are free")
        rest = self._num_free - num_pages
        pages = self._stack[rest : self._num_free][::-1].copy()
        self._is_free[pages] = False
        self._generation[pages] += 1
        self._num_free = rest
        return pages

    def free(self, pages: TokenIds) -> None:
        """Give pages back.

        Raises:
            ValueError: a page that is free already, given twice, the null page, or not of this pool; nothing is freed.
        """
        page_ids = to_int32(pages, "pages")
        num_pages = len(page_ids)
        if num_pages == 0:
            return
        try:
            # As unsigned, a negative id is far out of range instead of counting from the end.
            num_wrong = np.count_nonzero(self._is_free[page_ids.view(np.uint32)])
        except IndexError:
            num_wrong = num_pages
        if num_wrong == 0:
            order = np.arange(num_pages, dtype=np.int32)
            self._place[page_ids] = order
            num_wrong = np.count_nonzero(self._place[page_ids] != order)
        if num_wrong:
            raise ValueError(self._why_not(page_ids))
        self._stack[self._num_free : self._num_free + num_pages] = page_ids[::-1]
        self._is_free[page_ids] = True
        self._num_free += num_pages

    def generation_of(self, page: int) -> int:
        """How often the page was given out: what is known of its KV holds for one generation."""
        return int(self._generation[page])

    def free_mask(self) -> Bool[np.ndarray, " P"]:
        """A copy of which pages are free, the null page not counted, for audits."""
        mask = self._is_free.copy()
        mask[0] = False
        return mask

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the free list holds each free page once and the null page never."""
        listed = np.zeros(self._num_pages, np.int64)
        np.add.at(listed, self._stack[: self._num_free], 1)
        if listed[0] or (listed > 1).any():
            raise IntegrityError(f"pages {np.flatnonzero(listed > 1).tolist()} are listed as free twice, or page 0 is")
        if not np.array_equal(listed.astype(bool), self.free_mask()):
            off = np.flatnonzero(listed.astype(bool) != self.free_mask()).tolist()
            raise IntegrityError(f"pages {off} are free in only one of list and mask")

    def _why_not(self, page_ids: Int32[np.ndarray, " P"]) -> str:
        outside = page_ids[(page_ids < 0) | (page_ids >= self._num_pages)]
        if len(outside):
            return f"pages {outside.tolist()} are outside the pool's pages 1 to {self._num_pages - 1}"
        if (page_ids == 0).any():
            return "page 0 is the null page; nobody owns or frees it"
        values, counts = np.unique(page_ids, return_counts=True)
        twice = values[(counts > 1) | self._is_free[values]]
        return f"pages {twice.tolist()} are freed twice; free a page once, by its owner"
