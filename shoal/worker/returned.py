"""What `shoal.run` returns from workers, and what workers know of the calls before theirs.

Workers of a script run it again, up to their own call of shoal.run. A sweep chooses its next
setting by what earlier calls have returned, and may draw it at random, so they get both:

    launching process    before   what calls 1 and 2 did, and the arguments of call 3
    a worker of call 3   calls 1 and 2 return, or raise, the same; call 3 has these arguments
    its first worker     value    what train(job, …) has returned, or why it stays there

Values are data: see `comm/objects.py`. Nothing else leaves a process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np

from shoal.comm.objects import decode, encode
from shoal.errors import BadInput, ShoalError
from shoal.runtime.files import write_atomically
from shoal.runtime.wording import say

_MOST_BYTES = 16 << 20  # of what a call has returned, for workers of later ones
_BEFORE = "before"  # files
_VALUE = "value"
Train = Callable[..., Any]
# {"value": encoded}, {"error": text, "is_input": …} or {"stays": its type}
Outcome = dict[str, Any]


class PastCalls:
    """What the calls of shoal.run in this process have done."""

    def __init__(self) -> None:
        self._outcomes: dict[int, Outcome] = {}

    def note_value(self, call: int, value: Any) -> None:
        self._outcomes[call] = _outcome(value, _MOST_BYTES)

    def note_error(self, call: int, error: Exception) -> None:
        self._outcomes[call] = {"error": str(error), "is_input": isinstance(error, BadInput)}

    def write(self, folder: Path, given: Sequence[Any]) -> None:
        """For the workers of the next call, whose arguments are given."""
        for call, outcome in self._outcomes.items():
            if "stays" in outcome:
                say(
                    f"workers run the script again, where call {call} of shoal.run returns None: "
                    f"the {outcome['stays']} that it has returned here is no data, or too much"
                )
        arguments = {i: _outcome(value, _MOST_BYTES) for i, value in enumerate(given)}
        _write(folder / _BEFORE, {"calls": self._outcomes, "given": arguments})


def _outcome(value: Any, most_bytes: int) -> Outcome:
    with suppress(BadInput):
        encoded = encode(_plain(value))
        if len(encoded) <= most_bytes:
            return {"value": encoded}
    return {"stays": type(value).__name__}


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, and every mapping as a dict."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def outcome_of(folder: Path, call: int) -> Any:
    """In a worker of a later call: what this one has returned; raises what it has raised.

    What the script prints is not shown before the worker's own call: it has been printed already.
    """
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    outcome = _read(folder / _BEFORE)["calls"].get(call, {})
    if "error" in outcome:
        raise (BadInput if outcome["is_input"] else ShoalError)(outcome["error"])
    return decode(outcome["value"]) if "value" in outcome else None


def bound(train: Train, args: Sequence[Any]) -> Train:
    """`train(job, *args)` as a function of the job."""
    if not args:
        return train

    @wraps(train)
    def called(job: Any) -> Any:
        return train(job, *args)

    return called


def arguments_of(train: Train, args: Sequence[Any]) -> list[Any]:
    """Those of shoal.run, and of a `functools.partial`."""
    return [*args, *train.args, *train.keywords.values()] if isinstance(train, partial) else [*args]


def bound_as_launched(train: Train, args: Sequence[Any], folder: Path) -> Train:
    """`bound`, with the arguments that there were in the launching process."""
    sys.stdout = sys.__stdout__
    given = _read(folder / _BEFORE)["given"]
    values = [
        decode(given[i]["value"]) if "value" in given.get(i, {}) else own
        for i, own in enumerate(arguments_of(train, args))
    ]
    if isinstance(train, partial):
        start = len(args) + len(train.args)
        keywords = dict(zip(train.keywords, values[start:], strict=True))
        train = partial(train.func, *values[len(args) : start], **keywords)
    return bound(train, values[: len(args)])


def hand_back(folder: Path, value: Any) -> None:
    """In the first worker, when training is done."""
    _write(folder / _VALUE, _outcome(value, sys.maxsize))


def handed_back(folder: Path) -> Any:
    """In the launching process; BadInput where the value is no data."""
    if not (folder / _VALUE).is_file():
        return None
    outcome = _read(folder / _VALUE)
    if "stays" in outcome:
        raise BadInput(
            f"the training is done, and its function has returned a {outcome['stays']}: from "
            "workers come numbers, text, tensors, and lists, tuples and dicts of these, whose keys "
            "are text or integers, such as model.state_dict()"
        )
    return decode(outcome["value"])


def _write(file: Path, document: dict[str, Any]) -> None:
    write_atomically(file, encode(document))


def _read(file: Path) -> Any:
    return decode(file.read_bytes())
