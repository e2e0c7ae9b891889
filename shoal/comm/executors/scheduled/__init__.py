"""Collectives as schedules, interpreted over any transport."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.comm.executors.scheduled.selection import AlgorithmChoice
    from shoal.comm.group import Group
    from shoal.transport.transport import Transport


def ScheduledGroup(transport: Transport, algorithm: AlgorithmChoice = "auto") -> Group:
    """Deprecated: write `Group(Scheduled(transport, algorithm))`."""
    from shoal.comm.executors.scheduled.executor import Scheduled
    from shoal.comm.group import Group

    warnings.warn(
        "ScheduledGroup(transport, algorithm) is deprecated: write "
        "Group(Scheduled(transport, algorithm)) with Scheduled of "
        "shoal.comm.executors.scheduled.executor",
        DeprecationWarning,
        stacklevel=2,
    )
    return Group(Scheduled(transport, algorithm))
