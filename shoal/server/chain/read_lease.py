"""When a copy may answer a read alone. Time is an argument."""

from __future__ import annotations

_OF_TTL = 0.9  # clocks run at rates that differ by less


class ReadLease:
    """A copy's lease at the coordinator, and the epoch from which on it counts.

    A member is removed when the coordinator says that its lease has ended. So while it holds one,
    it is a member of the latest configuration, and everything committed is in its log. The value
    is read first and the lease is checked after: a pause at any moment is then harmless.

    A removal may be under way that was decided before this lease began. It fails once there is a
    later epoch than the one that was current after the lease had begun: the lease counts from then.
    """

    def __init__(self) -> None:
        self.number = 0  # of the present lease
        self.is_held = False
        self._until_s = float("-inf")
        self._settled_s = float("inf")
        self._after_epoch: int | None = None  # None: not known yet

    def granted(self, asked_s: float, ttl_s: float) -> None:
        """There is a new lease, asked for at `asked_s`, and alive/<process> is bound to it."""
        self.number += 1
        self._after_epoch = None  # first: another thread may ask for `is_valid`
        self.is_held = True
        self._until_s = asked_s + _OF_TTL * ttl_s
        self._settled_s = asked_s + ttl_s

    def renewed(self, asked_s: float, left_s: float) -> None:
        if self.is_held:
            self._until_s = max(self._until_s, asked_s + _OF_TTL * left_s)

    def lost(self) -> None:
        self.is_held = False
        self._until_s = float("-inf")
        self._settled_s = float("inf")
        self._after_epoch = None

    def saw(self, epoch: int, number: int) -> None:
        """This epoch was current at the coordinator, asked for when lease `number` had begun."""
        if self.is_held and number == self.number and self._after_epoch is None:
            self._after_epoch = epoch

    def needs_epoch(self, epoch: int) -> bool:
        """Whether the lease would count if there were a later epoch than this one."""
        return self._after_epoch is not None and epoch <= self._after_epoch

    def is_valid(self, epoch: int, now_s: float) -> bool:
        """Whether a member in this epoch may answer what it has read before `now_s`."""
        return now_s < self._until_s and self._after_epoch is not None and epoch > self._after_epoch

    def is_settled(self, now_s: float) -> bool:
        """Whether others have had time to get a lease, too, if all had lost theirs."""
        return now_s >= self._settled_s
