"""What to say about a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is closest, as a question; all known names if none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
