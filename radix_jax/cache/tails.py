"""Tails: the pages that requests left filled in part. The tree holds whole pages; these continue its prefixes."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import islice

from radix_jax.cache.donor import MAX_CANDIDATES, longest_beginning
from radix_jax.cache.errors import HandleError, IntegrityError
from radix_jax.cache.handles import PrefixHandle, TailHandle, TailPlace
from radix_jax.cache.keys import TOKEN_BYTES, namespace_key
from radix_jax.cache.node import RadixTreeNode


class Tails:
    """Pages of fewer tokens than page_size, each filed under the prefix in front of it; they are only ever copied from.

    max_pages: that are kept besides locked ones; beyond it the ones unused for longest go.

    A tail whose prefix left the tree is found no more, and goes as soon as it is the one unused for longest.
    """

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._by_page: OrderedDict[int, TailHandle] = OrderedDict()  # in order of last use
        self._by_place: dict[TailPlace, dict[bytes, TailHandle]] = {}
        self._num_locked = 0

    def __len__(self) -> int:
        return len(self._by_page)

    def last_used_first(self) -> Iterator[TailHandle]:
        """All tails."""
        return reversed(self._by_page.values())

    @property
    def num_locked(self) -> int:
        """Pages under a lock."""
        return self._num_locked

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could give."""
        return len(self._by_page) - self._num_locked

    @property
    def pages(self) -> list[int]:
        """The pages of all tails."""
        return list(self._by_page)

    def add(self, handle: PrefixHandle, namespace: Hashable, ids: bytes, page: int) -> list[int]:
        """Keep `page`, which holds the tokens `ids` behind what the handle covers. Returns the pages that are not kept:
        `page` itself where those tokens are cached already, or what it makes superfluous or too many."""
        place = _place(handle.node, namespace)
        tails = self._by_place.get(place, {})
        num_tokens = len(ids) // TOKEN_BYTES
        for keys in (reversed(handle.node.children), reversed(tails)):
            if longest_beginning(keys, ids)[1] == num_tokens:
                return [page]
        # What the new one continues.
        dropped = [old for old in islice(reversed(tails.values()), MAX_CANDIDATES) if ids.startswith(old.ids)]
        freed = [self._remove(old) for old in dropped if old.num_locks == 0]
        tail = TailHandle(self, place, namespace, ids, page)
        self._by_page[page] = self._by_place.setdefault(place, {})[ids] = tail
        return freed + self.evict_surplus()

    def find(self, node: RadixTreeNode, namespace: Hashable, page: bytes) -> tuple[TailHandle, int] | None:
        """The tail behind `node` that begins with the most of `page` (bytes of ids), and how many tokens of it."""
        tails = self._by_place.get(_place(node, namespace))
        if tails is None:
            return None
        key, num_common = longest_beginning(reversed(tails), page)
        return (tails[key], num_common) if num_common else None

    def lock(self, tail: TailHandle) -> None:
        """Keep a tail until `unlock`.

        Raises:
            HandleError: it is not kept any more, or of another cache.
        """
        if self._by_page.get(tail.page) is not tail:
            raise HandleError(f"the tail in page {tail.page} is not cached here (any more); match again")
        self._num_locked += tail.num_locks == 0
        tail.num_locks += 1

    def unlock(self, tail: TailHandle) -> None:
        """Give a lock back; the tail counts as just used.

        Raises:
            HandleError: it is not locked, or of another cache.
        """
        if tail.num_locks == 0 or tail.owner is not self:
            raise HandleError("the tail is not locked here; each lock is given back once")
        tail.num_locks -= 1
        self._num_locked -= tail.num_locks == 0
        self._by_page.move_to_end(tail.page)

    def evict(self, num_pages: int) -> list[int]:
        """Take out the unlocked tails unused for longest, up to `num_pages`; returns their pages."""
        unlocked = (tail for tail in self._by_page.values() if tail.num_locks == 0)
        return [self._remove(tail) for tail in list(islice(unlocked, max(num_pages, 0)))]

    def evict_surplus(self) -> list[int]:
        """Take out the unlocked ones unused for longest that are too many; returns their pages."""
        return self.evict(self.num_evictable - self._max_pages)

    def evict_lost(self) -> list[int]:
        """Take out those unused for longest whose prefixes left the tree; returns their pages."""
        pages = []
        while self._by_page:
            tail = next(iter(self._by_page.values()))
            if tail.num_locks or not tail.is_lost:
                break
            pages.append(self._remove(tail))
        return pages

    def reset(self) -> list[int]:
        """Take out all; returns their pages.

        Raises:
            HandleError: one is locked; nothing is taken out then.
        """
        if self._num_locked:
            raise HandleError(f"{self._num_locked} tails are locked; unlock every handle before a reset")
        return self.evict(len(self._by_page))

    def check_integrity(self, page_size: int) -> None:
        """Raise IntegrityError unless each tail is filed once, is short of a page, and locks add up."""
        filed = [tail for tails in self._by_place.values() for tail in tails.values()]
        if len(filed) != len(self._by_page) or not all(self._by_place.values()):
            raise IntegrityError(f"{len(self._by_page)} tails are kept, {len(filed)} are found")
        for page, tail in self._by_page.items():
            if tail.page != page or self._by_place[tail.place].get(tail.ids) is not tail:
                raise IntegrityError(f"the tail in page {page} is not where it is filed")
            if not 0 < len(tail.ids) < page_size * TOKEN_BYTES:
                raise IntegrityError(f"the tail in page {page} has {len(tail.ids) // TOKEN_BYTES} tokens")
        if self._num_locked != sum(tail.num_locks > 0 for tail in filed):
            raise IntegrityError(f"{self._num_locked} tails are counted as locked")

    def _remove(self, tail: TailHandle) -> int:
        del self._by_page[tail.page]
        there = self._by_place[tail.place]
        del there[tail.ids]
        if not there:
            del self._by_place[tail.place]
        return tail.page


def _place(node: RadixTreeNode, namespace: Hashable) -> TailPlace:
    """The end of the node; for a root, which comes and goes, its namespace. Trimming a node ends it elsewhere."""
    return (None, namespace_key(namespace)) if node.parent is None else (node, node.end_len)
