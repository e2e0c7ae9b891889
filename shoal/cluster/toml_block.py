"""One table of a cluster file, read key by key: each mistake names the file, the table and the key.

The keys carry their units. A table may say `source`, `reference` (free text: where the numbers were
read), `assumed` (keys whose figures are typical ones, unlike the others) and `spread` (by key, the
lowest and the highest value that was seen).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from shoal.cluster.hardware import Curve
from shoal.errors import BadInput

SOURCES = ("spec", "assumed", "measured", "fit")
MOST = 10_000_000  # of anything that is counted
LARGEST = 1e18


class TomlBlock:
    def __init__(self, file: str, name: str, table: Mapping[str, Any]):
        self.file = file
        self.name = name
        self.table = table
        self.known: list[str] = []

    def refuse(self, key: str, problem: str) -> NoReturn:
        where = f"[{self.name}] " if self.name else ""
        raise BadInput(f"{self.file}: {where}{key}: {problem}")

    def has(self, key: str) -> bool:
        self.known.append(key)
        return key in self.table

    def block(self, key: str) -> TomlBlock:
        """A table inside this one; an empty one where there is none."""
        self.known.append(key)
        table = self.table.get(key, {})
        name = f"{self.name}.{key}" if self.name else key
        if not isinstance(table, dict):
            self.refuse(key, f"a table [{name}] is expected, not {_words(table)}")
        return TomlBlock(self.file, name, table)

    def blocks(self, key: str) -> list[TomlBlock]:
        """The tables of an array [[key]]."""
        self.known.append(key)
        tables = self.table.get(key, [])
        name = f"{self.name}.{key}" if self.name else key
        if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
            self.refuse(key, f"tables [[{name}]] are expected, not {_words(tables)}")
        return [TomlBlock(self.file, name, table) for table in tables]

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """A number of at least `least`; required where there is no default."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, f"a number is expected, not {_words(value)}")
        if not _is_finite(value) or value < least:
            self.refuse(key, f"a number of at least {least:g} is expected, not {_short(value)}")
        if value > LARGEST:
            self.refuse(key, f"{_short(value)} is more than any machine has")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            self.refuse(key, f"a number above 0 is expected, not {value:g}")
        return value

    def share(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value > 1:
            self.refuse(key, f"a share between 0 and 1 is expected, not {value:g}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, f"a whole number is expected, not {_words(value)}")
        if value < 1:
            self.refuse(key, f"a whole number of at least 1 is expected, not {_short(value)}")
        if value > MOST:
            self.refuse(key, f"at most {MOST} are expected, not {_short(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            self.refuse(key, f"a text in quotes is expected, not {_words(value)}")
        return value

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.text(key, default)
        if value not in choices:
            self.refuse(key, f"one of {', '.join(choices)} is expected, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"true or false is expected, not {_words(value)}")
        return value

    def sizes(self, key: str) -> tuple[int, ...] | None:
        """Whole numbers such as [8, 8]."""
        if not self.has(key):
            return None
        value = self.table[key]
        whole = isinstance(value, list) and value
        if not whole or not all(type(one) is int and one >= 1 for one in value):
            self.refuse(key, f"a list of whole numbers such as [8, 8] is expected, not {value!r}")
        return tuple(value)

    def curve(self, key: str) -> Curve:
        """Points such as [[1e6, 0.1], [1e9, 0.6]], or one share for all sizes."""
        if not self.has(key):
            return Curve()
        value = self.table[key]
        try:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return Curve(((1.0, float(value)),))
            points = tuple((float(size), float(share)) for size, share in value)
            if not all(math.isfinite(size) for size, _ in points):
                raise ValueError(points)
            return Curve(points)
        except (BadInput, TypeError, ValueError, OverflowError) as error:
            reason = f": {error}" if isinstance(error, BadInput) else ""
            self.refuse(
                key, f"a share, or points [size, share] of increasing size, are expected{reason}"
            )

    def source(self) -> str:
        self.known.append("reference")
        return self.choice("source", "spec", SOURCES)

    def assumed(self) -> tuple[str, ...]:
        """The keys of this table whose figures are typical ones."""
        self.known.append("assumed")
        keys = self.table.get("assumed", [])
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            self.refuse("assumed", f"a list of keys is expected, not {_words(keys)}")
        for key in keys:
            if key not in self.table:
                there = [one for one in self.table if one not in ("assumed", "source", "reference")]
                self.refuse("assumed", f"the table has no {key}; {suggestion(key, there)}")
        return tuple(keys)

    def spread(self, scales: Mapping[str, tuple[str, float]]) -> dict[str, tuple[float, float]]:
        """By attribute the lowest and highest value; `scales`: key to attribute and unit."""
        block = self.block("spread")
        found = {}
        for key, value in block.table.items():
            if key not in scales:
                block.refuse(key, f"there is no such key; {suggestion(key, list(scales))}")
            attribute, unit = scales[key]
            found[attribute] = block._pair(key, value, unit)
        return found

    def _pair(self, key: str, value: Any, unit: float) -> tuple[float, float]:
        two = isinstance(value, list) and len(value) == 2
        if not two or not all(type(one) in (int, float) and _is_finite(one) for one in value):
            self.refuse(key, f"the lowest and the highest value are expected, not {value!r}")
        low = float(value[0])
        high = float(value[1])
        if not 0 <= low <= high:
            self.refuse(key, f"the lowest value comes first, and is not negative, in {value!r}")
        return low * unit, high * unit

    def finish(self) -> None:
        """Refuse keys that were not asked for."""
        for key in self.table:
            if key not in self.known:
                known = [one for one in dict.fromkeys(self.known) if one not in self.table]
                self.refuse(key, f"there is no such key; {suggestion(key, known)}")

    def _value(self, key: str, default: Any) -> Any:
        self.known.append(key)
        value = self.table.get(key, default)
        if value is None:
            close = difflib.get_close_matches(key, list(self.table), n=1, cutoff=0.8)
            meant = f"; there is {close[0]}, was it meant?" if close else ""
            self.refuse(key, f"it is required and is missing{meant}")
        return value


def suggestion(name: str, known: list[str]) -> str:
    """The known name that is closest, as a question; all of them where none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number with hundreds of digits
        return False


def _short(value: float) -> str:
    text = str(value)
    return text if len(text) <= 30 else f"{text[:27]}…"


def _words(value: object) -> str:
    kinds = {dict: "a table", list: "a list", bool: "true or false"}
    kind = kinds.get(type(value))
    return kind or repr(value)
