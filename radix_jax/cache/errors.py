"""What the cache raises."""


class OutOfPages(RuntimeError):
    """Fewer pages are free (and evictable) than were asked for; nothing was taken."""


class HandleError(RuntimeError):
    """A handle used where it has no meaning: unlocked twice, of another tree, or after its prefix was evicted."""


class IntegrityError(AssertionError):
    """Bookkeeping contradicts itself; the message names what is off."""
