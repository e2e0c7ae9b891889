"""Calls and names that a job does not know, in one sentence each, with the one that is meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shoal.errors import BadInput
from shoal.runtime.wording import nearest

_P = ParamSpec("_P")
_R = TypeVar("_R")
OF_OTHERS = {  # names that other libraries have
    "world_size": "size",
    "num_workers": "size",
    "global_rank": "rank",
    "is_main_process": "is_first",
    "is_global_zero": "is_first",
    "is_local_main_process": "local_rank",
    "save_checkpoint": "save",
    "train_step": "step",
}


class NoSuchName(BadInput, AttributeError):
    """`hasattr` answers as ever."""


def no_such_name(name: str, known: list[str]) -> NoSuchName:
    meant = f"it is job.{OF_OTHERS[name]} here" if name in OF_OTHERS else nearest(name, known)
    return NoSuchName(f"a job has no {name!r}: {meant}")


def called_by_name(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Arguments that do not fit are `BadInput`, with how the method is called."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except TypeError:
            _check(method, args, kwargs)
            raise

    return call


def _check(
    method: Callable[..., object], args: tuple[object, ...], given: dict[str, object]
) -> None:
    signature = inspect.signature(method)
    known = list(signature.parameters)[1:]
    unknown = [name for name in given if name not in known and not _takes_any(signature)]
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        why = f"no argument is {unknown[0]!r}; {nearest(unknown[0], known)}" if unknown else error
        raise BadInput(f"{_call(method.__name__, signature)}: {why}") from None


def _takes_any(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _call(name: str, signature: inspect.Signature) -> str:
    """`job.step(model, loss, optimizer=…)`: what is given by position, and what has to be."""
    parts = []
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            parts.append("name=…")
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            parts.append(parameter.name)
        elif parameter.default is parameter.empty:
            parts.append(f"{parameter.name}=…")
    return f"job.{name}({', '.join(parts)})"
