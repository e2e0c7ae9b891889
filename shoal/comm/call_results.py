"""Results of calls that all workers make together, kept for workers that come later.

A call is known by the step at which it is made, and by its number among those of that step. The
first worker that has ended a call writes its result for all; a CheckpointError is a result, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shoal.comm.board import Records
from shoal.errors import CheckpointError

T = TypeVar("T")
Key = tuple[int, int]  # a step, and the number of a call among those of that step


class CallResults:
    """The owner of `records` hands the documents of results to `take`."""

    def __init__(self, records: Records):
        self._records = records
        self._results: dict[Key, dict[str, Any]] = {}
        self._last_key: Key | None = None

    def next_key(self, steps: int) -> Key:
        """That of the call which this worker makes now, after so many steps."""
        last = self._last_key
        self._last_key = (steps, last[1] + 1 if last is not None and last[0] == steps else 0)
        return self._last_key

    def __contains__(self, key: Key) -> bool:
        return key in self._results

    def share(self, key: Key, act: Callable[[], T]) -> T:
        """What `act` returns, which has to be JSON; it is the result for the others."""
        try:
            result = act()
        except CheckpointError as error:
            self._conclude(key, {"error": str(error)})
            raise
        self._conclude(key, {"result": result})
        return result

    def get(self, key: Key) -> Any:
        """What the call returned to those who took part, or the error that it raised."""
        document = self._results[key]
        if "error" in document:
            raise CheckpointError(str(document["error"]))
        return document["result"]

    def take(self, document: dict[str, Any]) -> None:
        """A result that was read."""
        self._results[document["at"][0], document["at"][1]] = document

    def _conclude(self, key: Key, document: dict[str, Any]) -> None:
        self._records.append(lambda: None if key in self._results else {"at": key, **document})
