"""A strategy of the user's own: FILE.py:NAME is a class of a Python file.

    mine.py:lazy_ddp(every=2)
    mine.py:lazy_ddp + pp(2)

The file has the term (`SyncTerm`), whose method `step_of` says what a step holds and exchanges, and
its `SyncPlan`, registered with `@runs(lazy_ddp)`. It is run where a user names it, on the command
line or in Python. What is read as data names a term of which nothing is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from shoal.errors import BadInput
from shoal.schedules import user
from shoal.strategy.base import SyncTerm

_QUOTED = re.compile(r"""("[^"]*"|'[^']*')""")
_NAMED = re.compile(r"(^|\+)(\s*)([^\s+()\"']+\.py:[A-Za-z_]\w*)")


def unread_term(name: str) -> SyncTerm:
    """Stands for a term of a file that is not read, whatever its options were."""
    kind: Any = type("Unread", (SyncTerm,), {"source": name, "compared": ()})
    term: SyncTerm = dataclass(frozen=True)(kind)()
    return term


def stand_ins(text: str) -> tuple[str, dict[str, str]]:
    """The text with a name for each FILE.py:NAME outside of quotes, and what they stand for."""
    known: dict[str, str] = {}

    def name(found: re.Match[str]) -> str:
        stand_in = f"_file_{len(known)}"
        known[stand_in] = found[3]
        return f"{found[1]}{found[2]}{stand_in}"

    parts = _QUOTED.split(text)
    return "".join(part if i % 2 else _NAMED.sub(name, part) for i, part in enumerate(parts)), known


@cache
def load_term(name: str) -> type[SyncTerm]:
    """Runs the file."""
    kind = user.load_function(name)
    if not (isinstance(kind, type) and issubclass(kind, SyncTerm)):
        raise BadInput(f"{name} must be a class that is a shoal.strategy.base.SyncTerm")
    kind.source = name
    kind.sync_module = kind.__module__
    return kind
