"""Branch: where pages go that continue a cached prefix, and that only those who know of the branch share."""

from collections.abc import Hashable


class Branch:
    """Namespaces that nobody else can have, for what lies behind a prefix in a namespace of others.

    Pages are filed by the tokens behind that prefix, so another prefix in front of them takes another namespace.

    base_len: tokens of the prefix, whole pages; None before the first match. namespaces: all so far, the last one in
        use.
    """

    __slots__ = ("base_len", "namespaces")

    def __init__(self) -> None:
        self.base_len: int | None = None
        self.namespaces: list[Hashable] = []

    @property
    def namespace(self) -> Hashable:
        """The one in use, once there is one."""
        return self.namespaces[-1]

    def begin_behind(self, base_len: int) -> None:
        """From now on continue a prefix of `base_len` tokens."""
        if base_len != self.base_len:
            self.base_len = base_len
            self.namespaces.append(object())
