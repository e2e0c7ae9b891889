"""Constraints on options of terms: what a value may be, and how it is written in a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

MAX_NUMBER = 10**9  # bounds every option, so that what was accepted can be printed and read back


class Constraint(NamedTuple):
    """What an option may be, in words and as a check, and the form in which it is kept."""

    allowed: str
    accepts: Callable[[Any], bool]
    keep: Callable[[Any], Any] = lambda value: value


def one_of(*values: str | int) -> Constraint:
    names = ", ".join(map(show, values))
    return Constraint(
        f"one of {names}", lambda v: any(type(v) is type(a) and v == a for a in values)
    )


def whole(least: int, most: int = MAX_NUMBER) -> Constraint:
    words = f"a whole number from {least} to {most}"
    return Constraint(words, lambda v: type(v) is int and least <= v <= most)


def positive(most: int) -> Constraint:
    def accepts(value: object) -> bool:
        return isinstance(value, int | float) and value is not True and 0 < value <= most

    def keep(value: float) -> float:  # 4.0 as 4, so that equal strategies print alike
        return int(value) if value == int(value) else float(value)

    return Constraint(f"a number above 0 and at most {most}", accepts, keep)


def fraction_or_count(of: str) -> Constraint:
    """1 is the fraction, all of them, as 1.0 is: equal numbers mean the same. Counts are above."""
    fraction = positive(1)
    count = whole(2)
    return Constraint(
        f"{fraction.allowed}, or a whole number of {of} from 2 on",
        lambda value: fraction.accepts(value) or count.accepts(value),
        fraction.keep,
    )


def one_of_or_like(allowed: str, names: Sequence[str], pattern: str) -> Constraint:
    """One of `names`, or a text of the form `pattern`, which is `allowed` in words."""
    known = one_of(*names)
    like = text_like(allowed, pattern)
    return Constraint(
        f"{known.allowed}, or {allowed}", lambda v: known.accepts(v) or like.accepts(v)
    )


def text_like(allowed: str, pattern: str) -> Constraint:
    return Constraint(allowed, lambda v: is_printable(v) and bool(re.fullmatch(pattern, v)))


def optional(constraint: Constraint) -> Constraint:
    return Constraint(
        f"None or {constraint.allowed}",
        lambda value: value is None or constraint.accepts(value),
        lambda value: None if value is None else constraint.keep(value),
    )


def is_printable(value: object) -> bool:
    """A line break or a lone surrogate could not be written on a log line and read back."""
    return isinstance(value, str) and value.isprintable() and value != ""


def is_plan(value: object) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    return all(
        is_printable(name) and style in ("column", "row", "whole") for name, style in value.items()
    )


def is_names(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(is_printable, value))


def show(value: object) -> str:
    """A value as the notation writes it, cut to fit a sentence, whatever the value is."""
    try:
        return clip(write(value))
    except Exception:  # a foreign object's repr may raise anything, and so does a huge int's
        return f"({type(value).__name__})"


def write(value: object) -> str:
    if isinstance(value, str):
        # for printable text also Python's notation; the rest is only ever shown in an error
        return json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write(k)}: {write(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(write, value)) + "]"
    return repr(value)


def clip(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
