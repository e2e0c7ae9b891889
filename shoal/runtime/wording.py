"""Sentences for the user: where they go, and numbers and nouns in them."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence

# what a terminal obeys or turns around; line breaks and tabs stay
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """With \\x1b for an escape: names come from files of others."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str) -> None:
    """A line of Shoal itself, on stderr."""
    print(f"shoal: {printable(text)}", file=sys.stderr, flush=True)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun.

    >>> [counted(1, "worker"), counted(2, "worker"), counted(3, "switch", "switches")]
    ['1 worker', '2 workers', '3 switches']
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Numbers of one kind.

    >>> [listed("worker", [1]), listed("worker", [0, 2, 3])]
    ['worker 1', 'workers 0, 2 and 3']
    """
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    return f"{noun}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is closest, as a question; all known names if none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
