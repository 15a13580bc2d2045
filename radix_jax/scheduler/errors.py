"""What a scheduler refuses for now."""

from radix_jax.cache.errors import OutOfPages


class QueueFull(RuntimeError):
    """As many requests wait as may; try again later."""


class NoRoom(OutOfPages):
    """Requests wait, none runs, and the next one does not fit beside what others lock; nothing was changed."""
