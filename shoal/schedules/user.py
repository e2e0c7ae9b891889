"""A user's own schedules: FILE.py:FUNCTION names a function of a Python file.

    collective   (ranks) -> Collective
    pipeline     (stages, stage, microbatches[, chunks]) -> list of Action

Loading runs the file. What the functions return is checked here for its type; `prove` checks the
schedule itself. A relative path is that of the directory in which the process first uses it, which
is the launching directory, even if the script changes directory later.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import BadInput
from shoal.schedules.pipelines import Action, Pipeline

if TYPE_CHECKING:
    from shoal.schedules.collectives import Collective


PATTERN = r".+\.py:[A-Za-z_][A-Za-z0-9_]*"


def is_user_function(name: str) -> bool:
    """Whether a name is FILE.py:FUNCTION instead of one of a catalog."""
    return re.fullmatch(PATTERN, name) is not None


def load_collective(name: str) -> Callable[[int], Collective]:
    """The user's function from ranks to a `Collective`."""
    from shoal.schedules.collectives import Collective  # numpy: only if it is needed

    function = load_function(name)

    @functools.wraps(function)
    def make(ranks: int) -> Collective:
        collective = _call(name, function, ranks)
        if not isinstance(collective, Collective):
            raise BadInput(
                f"{name} must return a Collective, and returned {_a(collective)} for {ranks} ranks"
            )
        return collective

    return make


def load_pipeline(name: str) -> Callable[..., list[Action]]:
    """The user's function from (stages, stage, microbatches[, chunks]) to the stage's actions."""
    function = load_function(name)

    @functools.wraps(function)
    def make(stages: int, stage: int, *sizes: int) -> list[Action]:
        actions = _call(name, function, stages, stage, *sizes)
        if not isinstance(actions, list | tuple):
            raise BadInput(f"{name} must return a list of Action, and returned {_a(actions)}")
        for action in actions:
            if not isinstance(action, Action):
                raise BadInput(f"{name} must return a list of Action, and {_a(action)} is in it")
        return list(actions)

    return make


def load_function(name: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names."""
    path, _, function_name = name.rpartition(":")
    file = _absolute(path)
    name = f"shoal_user_schedule_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise BadInput(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module that defines them
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"{path} cannot be loaded: {_describe(error, path)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BadInput(f"{path} has no function {function_name}")
    return function  # type: ignore[no-any-return]


@functools.cache
def _absolute(path: str) -> Path:
    return Path(path).absolute()


def _call(name: str, function: Callable[..., Any], *arguments: int) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        path = name.rpartition(":")[0]
        raise BadInput(f"{name} raised {_describe(error, path)}") from error


def _describe(error: Exception, path: str) -> str:
    """The error in one line, with the line of the user's file where it happened."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(_absolute(path))]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def digest(schedule: Collective | Pipeline) -> bytes:
    """Equal for equal schedules: workers compare it before they train."""
    text = repr(schedule)
    if not isinstance(schedule, Pipeline):
        sizes = (schedule.kind, schedule.ranks, schedule.chunks, schedule.scratch)
        text = repr((sizes, schedule.root, [tuple(row) for row in schedule.rounds]))
    return hashlib.sha256(text.encode()).digest()
