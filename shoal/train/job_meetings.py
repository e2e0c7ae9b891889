"""What all workers of a job do together, where lost workers may come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from shoal.sync.base import Comeback
from shoal.train.agreement import Agreement
from shoal.train.job_state import JobState

if TYPE_CHECKING:
    from shoal.comm.meetings import Meeting
    from shoal.train.elastic_training import ElasticTraining

T = TypeVar("T")


class JobMeetings:
    """A worker that came back takes its place, and does not do again what was done meanwhile."""

    def __init__(self, state: JobState, agreement: Agreement, elastic: ElasticTraining | None):
        self._state = state
        self._agreement = agreement
        self._elastic = elastic
        self._meetings = state.services.meetings

    @property
    def takes_returns(self) -> bool:
        """Whether lost workers may come back, other than in an elastic run."""
        return self._meetings is not None

    def hold(self, act: Callable[[], T]) -> T:
        """Do what all workers do together, or get what it returned to the others."""
        if self._elastic is not None:
            return self._elastic.hold(act)
        if self._meetings is None:
            return act()
        self.come_back()

        def begin(meeting: Meeting) -> T:
            for step in self._state.models:
                step.sync.meet(meeting.number, meeting.generations)
            if self._state.services.elastic_sum is not None:
                self._state.services.elastic_sum.begin(meeting.name)
            self._agreement.begin(meeting.name)
            return act()

        result: T = self._meetings.hold(self._state.stream.steps_passed, begin)
        return result

    def come_back(self) -> None:
        """Take the place of a process of this worker that was lost, at the present step."""
        if self._elastic is not None:
            self._elastic.join()
            return
        meetings = self._meetings
        if meetings is None or not meetings.is_away or not self._state.models:
            return
        if meetings.take_place(self._take_place) >= 0:
            for step in self._state.models:
                step.sync.catch_up()

    def _take_place(self) -> int:
        found = [step.sync.come_back() for step in self._state.models]
        returns = [returned for returned in found if returned is not None]
        if not returns:
            self._state.note_return(Comeback(0, 0))
            return -1  # it was lost before it had joined the others: it is there from the start
        latest = max(returns)
        for step in self._state.models:
            step.steps = step.update.steps = latest.step
        self._state.go_on_after(latest.step, latest.step, None)
        self._state.note_return(latest)
        return latest.step
