"""Tracing with torch.fx beside threads that compute: it changes nn.Module while it traces."""

from __future__ import annotations

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

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        try:
            return super().trace(root, concrete_args)
        except SystemExit as end:  # of a forward that does not like what stands for its values
            raise ValueError(f"it calls sys.exit({end.code!r})") from end

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
