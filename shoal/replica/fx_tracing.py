"""Tracing with torch.fx beside threads that compute: it changes nn.Module while it traces."""

from __future__ import annotations

import builtins
import sys
import threading
from typing import Any

from torch import fx, nn

# one trace at a time; and no thread sets a global random generator meanwhile, since a trace looks
# at their states to see whether the forward draws numbers
tracing = threading.RLock()


class ThreadTracer(fx.Tracer):
    """Other threads call their modules as ever."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return self.call_traced(m, forward, args, kwargs)

    def call_traced(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call in the thread that traces."""
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


class TypeAsked(Exception):
    """A forward does something else for another type of a value, and a trace has no types."""


class TypeQuestions:
    """Answers `isinstance` about traced values, in this thread: each has the type `answer`.

    torch.fx alone says that no value is a tensor, a tuple or a dict. What torch itself asks keeps
    that answer. Other threads are not concerned; the lock `tracing` is held.
    """

    def __init__(self, answer: type | None = None):
        self.answer = answer
        self.asked = ""  # the first value whose type was asked for
        self._thread = threading.get_ident()
        self._isinstance = builtins.isinstance

    def __enter__(self) -> TypeQuestions:
        builtins.isinstance = self._ask
        return self

    def __exit__(self, *_: Any) -> None:
        builtins.isinstance = self._isinstance

    def _ask(self, value: Any, kinds: Any) -> bool:
        found = self._isinstance(value, kinds)
        if found or type(value) is not fx.Proxy or threading.get_ident() != self._thread:
            return found
        if _is_inside_torch(sys._getframe(1)):
            return found
        self.asked = self.asked or value.node.name
        return self.answer is not None and issubclass(self.answer, kinds)


def _is_inside_torch(frame: Any) -> bool:
    """`torch.is_tensor` is a question of its caller; what else torch asks is its own affair."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch.")
