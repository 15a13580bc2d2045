"""What a scheduler refuses for now."""

from radix_jax.cache.errors import OutOfPages


class QueueFull(RuntimeError):
    """As many requests wait as may; try again later."""


def check_queue(num_waiting: int, num_samples: int, most: int | None) -> None:
    """Refuse so many samples more, where more than `most` would wait.

    Raises:
        QueueFull: not now. ValueError: never.
    """
    if most is None or num_waiting + num_samples <= most:
        return
    if num_samples > most:
        raise ValueError(f"n={num_samples} samples never fit max_queued_requests={most}; raise that or lower n")
    newcomers = f" and {num_samples} samples come" if num_samples > 1 else ""
    raise QueueFull(f"{num_waiting} requests wait{newcomers}, max_queued_requests={most}; try again later")


class NoRoom(OutOfPages):
    """Requests wait, none runs, and the next one does not fit beside what others lock; nothing was changed."""
