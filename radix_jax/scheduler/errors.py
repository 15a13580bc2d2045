"""What a scheduler refuses for now."""


class QueueFull(RuntimeError):
    """As many requests wait as may; try again later."""
