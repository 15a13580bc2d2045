"""Seats: numbers that the running requests keep to themselves, for what the device holds of each."""

from collections.abc import Iterable


class Seats:
    """Small numbers: a new one only where none is free, so that all are below the most that ever ran at once."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num_seats = 0

    def take(self) -> int:
        """A number that nobody has."""
        if self._free:
            return self._free.pop()
        self._num_seats += 1
        return self._num_seats - 1

    def give_back(self, seat: int) -> None:
        """Nobody has it any more."""
        self._free.append(seat)

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Prove that each number has one owner or none. taken: those of the running requests.

        Raises:
            AssertionError: the numbers.
        """
        seats = sorted([*self._free, *taken])
        assert seats == list(range(self._num_seats)), f"seats taken and free are {seats} of {self._num_seats}"
