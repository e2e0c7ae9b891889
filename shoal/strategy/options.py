"""What the options of terms may be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shoal.errors import StrategyError
from shoal.schedules import graphs as edges
from shoal.schedules import user

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


GRAPHS = (
    *("ring", "torus", "hypercube", "exponential"),
    *("star", "complete", "one-peer", "random-regular"),
)

# of schedules/pipelines/catalog.py, which need not be loaded for it
SCHEDULES = ("inter-op", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "bfs")
GRAPHS_OF_ANY_NUMBER = tuple(graph for graph in GRAPHS if graph != "hypercube")
_SETTING = r"[a-z][a-z0-9_]*=[0-9]+(\.[0-9]+)?(e-?[0-9]+)?"
_FRACTION = r"(1|0\.0{0,9}[1-9][0-9]{0,9}|[1-9](\.[0-9]{1,9})?e-[1-9][0-9]?)"
SYNC_OR_ASYNC = one_of("sync", "async")
_FRACTION_OF_ALL = positive(1)  # 1 is all of them, as 1.0 is; counts are above
QUORUM = Constraint(
    f"{_FRACTION_OF_ALL.allowed}, or a whole number of workers from 2 on",
    lambda value: _FRACTION_OF_ALL.accepts(value) or whole(2).accepts(value),
    _FRACTION_OF_ALL.keep,
)
FLAG = Constraint("True or False", lambda value: isinstance(value, bool))
_USER_SCHEDULE = '"FILE.py:FUNCTION"'
ALGORITHM = text_like(
    f'a name such as "ring" or "tree", or {_USER_SCHEDULE}',
    rf"[A-Za-z_][A-Za-z0-9_-]*|{user.PATTERN}",
)
SCHEDULE = text_like(
    f"{one_of(*SCHEDULES).allowed}, or {_USER_SCHEDULE} (chunks=2 beside it gives a device two "
    "stages)",
    "|".join([*SCHEDULES, user.PATTERN]),
)
COMPRESS = text_like(
    '"fp16", "bf16", "int8", "int4", "topk(0.01)", "powersgd(rank=4)" or "onebit"',
    rf"fp16|bf16|int8|int4|onebit|topk\({_FRACTION}\)|powersgd\(rank=[1-9][0-9]{{0,5}}\)",
)
_GRAPH_FILE = rf"(?!{edges.INLINE}).+\.(txt|csv|edges)"
_GRAPH_TEXT = text_like(
    f"one of {', '.join(GRAPHS)}, a path that ends in .txt, .csv or .edges, edges such as "
    '"edges:0-1,1-2,2-0", or a networkx graph',
    "|".join(GRAPHS)
    + r"|random-regular\(degree=[0-9]{1,3}(, ?seed=[0-9]{1,9})?\)"
    + rf"|{edges.PATTERN}|{_GRAPH_FILE}",
)
GRAPH = Constraint(
    _GRAPH_TEXT.allowed,
    lambda value: edges.is_networkx(value) or _GRAPH_TEXT.accepts(value),
    lambda value: edges.write_edges(value) if edges.is_networkx(value) else value,
)


def names_file(value: object) -> bool:
    """Whether an option is a file of the user: a schedule's, which is code, or a graph's."""
    return isinstance(value, str) and bool(re.fullmatch(f"{user.PATTERN}|{_GRAPH_FILE}", value))


OUTER = text_like(
    'an optimizer such as "nesterov(lr=0.7)"', rf"[a-z][a-z0-9_]*(\({_SETTING}(, ?{_SETTING})*\))?"
)
PLAN = Constraint(
    'a dict of module names to "column", "row" or "whole"',
    lambda v: (
        isinstance(v, Mapping)
        and len(v) > 0
        and all(is_printable(n) and how in ("column", "row", "whole") for n, how in v.items())
    ),
    lambda v: dict(sorted(v.items())),
)
NAMES = Constraint(
    "a list of module names",
    lambda v: isinstance(v, list | tuple) and len(v) > 0 and all(map(is_printable, v)),
    tuple,
)


# Outer optimizers of localsgd: what can be set, and its default.
OUTERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 1.0, "momentum": 0.0, "warmup": 10.0},
    "nesterov": {"lr": 0.7, "momentum": 0.9, "warmup": 10.0},
    "adam": {"lr": 0.3, "beta1": 0.9, "beta2": 0.95, "eps": 0.1},
}


_RANGES = {"lr": "above 0", "eps": "above 0", "warmup": "0 or more rounds"}


def read_setting(text: str) -> tuple[str, dict[str, float]]:
    """The name before the bracket and the numbers inside; one without a name is called ""."""
    name, _, inside = text.rstrip(")").partition("(")
    words = [word.strip().rpartition("=") for word in inside.split(",") if word]
    return name, {key: float(value) for key, _, value in words}


def outer_settings(text: str) -> tuple[str, dict[str, float]]:
    """The outer optimizer that `text` names, with all its settings, checked."""
    name, given = read_setting(text)
    known = OUTERS.get(name)
    if known is None:
        raise StrategyError(
            f"localsgd: there is no outer optimizer {name!r}; there are {', '.join(OUTERS)}"
        )
    for key, value in given.items():
        if key not in known:
            raise StrategyError(f"localsgd: outer {name} has no {key!r}; it has {', '.join(known)}")
        words = _RANGES.get(key, "from 0 to below 1")
        below = float("inf") if key in _RANGES else 1.0
        if not 0 <= value < below or (value == 0 and words == "above 0"):
            raise StrategyError(f"localsgd: {key} of outer {name} has to be {words}, not {value}")
    if name == "nesterov" and given.get("momentum") == 0:
        raise StrategyError("localsgd: outer nesterov without momentum is sgd: say sgd")
    return name, {**known, **given}
