"""Where in a script a loop over batches stands: its call, and the turn of the loops around it.

    def train(job):                                  site "train 1": the first job.batches of train
        for epoch in range(start, 10):               counters (epoch,)
            for batch in job.batches(data, 32):

A script that continues says by this whether its first loop is the first one of the run that saved,
or the one that was interrupted.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

from shoal.runtime.decoders import parse_module

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_OWN_FRAMES = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Place(NamedTuple):
    """`counters` are the variables of the `for` loops around it, the outermost first.

    None is a loop whose turns cannot be told apart: `while`, or no integer.
    """

    site: str
    counters: tuple[int | None, ...] = ()

    @property
    def call(self) -> str:
        """Which one it is of the calls in its function, from the top."""
        function, _, number = self.site.rpartition(" ")
        return f"call {number} in {function.rpartition('/')[2]}"

    @property
    def turns(self) -> tuple[int, ...] | None:
        """The counters, where each loop around it has one."""
        known = tuple(value for value in self.counters if value is not None)
        return known if len(known) == len(self.counters) else None


def calling_frame() -> FrameType | None:
    """The innermost one outside of Shoal."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return frame


def _frames(outermost: CodeType | None) -> Iterator[FrameType]:
    """From Shoal's caller out to the function `outermost`."""
    frame = calling_frame()
    while frame is not None and not _is_ours(frame):
        yield frame
        frame = None if frame.f_code is outermost else frame.f_back


def lines_of_caller(outermost: CodeType | None) -> list[int]:
    """Of the calls that have led here, each in its function: a later call has larger ones."""
    return [f.f_lineno - f.f_code.co_firstlineno for f in _frames(outermost)][::-1]


def place_of_caller(outermost: CodeType | None, callee: str = "batches") -> Place:
    """The place of the call that has led here, in Shoal's caller or in the function `outermost`."""
    site = list[str]()
    counters = list[int | None]()
    for frame in _frames(outermost):
        code = frame.f_code
        if _package(frame) not in sys.stdlib_module_names:  # whose loops are not of the script
            linecache.lazycache(code.co_filename, frame.f_globals)
            number, variables = _call(code, frame.f_lineno, callee)
            site.insert(0, f"{code.co_name} {number}")
            counters[:0] = [_value(frame, name) for name in variables]
        callee = code.co_name
    return Place("/".join(site), tuple(counters))


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return _package(frame) == "shoal" and not name.startswith("shoal.commands.examples.")


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _value(frame: FrameType, name: str | None) -> int | None:
    value = frame.f_locals.get(name, frame.f_globals.get(name)) if name else None
    return value if type(value) is int else None


@lru_cache(maxsize=1024)
def _call(code: CodeType, line: int, callee: str) -> tuple[int, tuple[str | None, ...]]:
    """Which call of `callee` in its function one is, and the variables of the loops around it.

    Without the source, as under `python -c`, it is in a loop that has no variable.
    """
    try:
        tree = parse_module("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError, RecursionError):
        return 0, (None,)
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.expr, ast.stmt))]
    here = [node for node in nodes if node.lineno <= line <= (node.end_lineno or 0)]
    calls = [_start(node) for node in here if _is_call(node, callee)]
    starts = calls or [_start(node) for node in here if node.lineno == line]
    if not starts:
        return 0, (None,)
    path: list[ast.AST] = [tree]
    while inner := [n for n in ast.iter_child_nodes(path[-1]) if _contains(n, min(starts))]:
        path.append(inner[0])
    kinds = _COMPREHENSIONS if code.co_name in _OWN_FRAMES else _FUNCTIONS
    path = path[max((i for i, node in enumerate(path) if isinstance(node, kinds)), default=0) :]
    number = sum(_is_call(n, callee) and _start(n) <= min(starts) for n in ast.walk(path[0]))
    loops = (_variables(node, child) for node, child in pairwise(path))
    return number, tuple(name for names in loops for name in names)


def _start(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _contains(node: ast.AST, at: tuple[int, int]) -> bool:
    if isinstance(node, (ast.expr, ast.stmt)):
        return _start(node) <= at < (node.end_lineno or 0, node.end_col_offset or 0)
    return any(_contains(child, at) for child in ast.iter_child_nodes(node))


def _is_call(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return name == getattr(node.func, "attr", getattr(node.func, "id", None))


def _variables(node: ast.AST, child: ast.AST) -> list[str | None]:
    """Of the loops of `node` around its child: none where it is what a `for` goes over."""
    if isinstance(node, (ast.For, ast.AsyncFor)) and child in node.body:
        return [_first_name(node.target)]
    if isinstance(node, ast.While) and child not in node.orelse:
        return [None]
    if isinstance(node, _COMPREHENSIONS) and child is not node.generators[0]:
        return [_first_name(loop.target) for loop in node.generators if loop is not child]
    return []


def _first_name(target: ast.expr) -> str | None:
    first = target.elts[0] if isinstance(target, ast.Tuple) else target
    return first.id if isinstance(first, ast.Name) else None
