"""Questions to all other members that are not yet answered by each of them."""

from __future__ import annotations

from collections.abc import Iterable


class Rounds:
    """Numbered rounds, each with the members that have not confirmed it."""

    def __init__(self) -> None:
        self._last = 0
        self._waits_for: dict[int, set[int]] = {}

    def open(self, members: Iterable[int]) -> int:
        self._last += 1
        self._wait(self._last, members)
        return self._last

    def restart(self, members: list[int]) -> None:
        """A new epoch: each open round is about its members."""
        for number in list(self._waits_for):
            self._wait(number, members)

    def _wait(self, number: int, members: Iterable[int]) -> None:
        self._waits_for[number] = set(members)
        self._close_if_complete(number)

    def confirm(self, number: int, member: int) -> None:
        if number in self._waits_for:
            self._waits_for[number].discard(member)
            self._close_if_complete(number)

    def _close_if_complete(self, number: int) -> None:
        if not self._waits_for[number]:
            del self._waits_for[number]

    def open_for(self, member: int) -> list[int]:
        return [number for number, waits_for in self._waits_for.items() if member in waits_for]

    def missing(self, number: int) -> set[int]:
        """Who has not confirmed it."""
        return self._waits_for.get(number, set())

    def is_closed(self, number: int) -> bool:
        return number not in self._waits_for
