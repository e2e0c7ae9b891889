"""torch._dynamo is loaded when something is compiled, not by every optimizer.

The first step of torch's optimizers imports it, for 1.5 s and 70 MB, to tell a compiler to leave
them alone, and a process group to clear a cache of it. In a process that compiles nothing these
calls do nothing, and a placeholder answers them. Any other use of torch._dynamo loads it, and what
was disabled is disabled by it then.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import MutableSequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_DISABLED = "__dynamo_disable"  # where torch keeps what `disable` has returned


def load_when_used() -> None:
    """From now on `import torch._dynamo` gives a placeholder, unless it is loaded already."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = placeholder = _Placeholder(_NAME)
        sys.meta_path.insert(0, placeholder)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._load(), name)

    def _load(self) -> Any:
        """The module itself."""
        return importlib.import_module(self.__name__)


class _Rules(_Module):
    def clear_lru_cache(self) -> None:
        """There is none yet."""


class _Placeholder(_Module, MetaPathFinder, Loader):
    __path__: MutableSequence[str] = []  # noqa: RUF012  # find_spec finds its modules
    trace_rules = _Rules(f"{_NAME}.trace_rules")

    def graph_break(self, msg: str = "") -> None:
        """Nothing is traced."""

    def disable(self, fn: Any = None, *options: Any, **named: Any) -> Any:
        if not callable(fn):
            return self._load().disable(fn, *options, **named)
        vars(self).setdefault("disabled", []).append(fn)
        return fn

    def _load(self) -> Any:
        """The module itself, which takes the place of this."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
            for function in vars(self).get("disabled", ()):
                vars(function).pop(_DISABLED, None)
        return super()._load()

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Of a module in it, which it may load itself: then not once more."""
        if not name.startswith(f"{_NAME}.") or sys.modules.get(_NAME) is not self:
            return None
        if name == f"{_NAME}.config":  # all that fake tensors need
            return PathFinder.find_spec(name, [f"{sys.modules['torch'].__path__[0]}/_dynamo"])
        self._load()
        found = importlib.import_module(name)
        spec = ModuleSpec(name, self, is_package=hasattr(found, "__path__"))
        spec.loader_state = found, found.__spec__
        return spec

    def find_distributions(self, *_: object) -> tuple[()]:
        """None; importlib.metadata asks every finder."""
        return ()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module, spec.loader_state = spec.loader_state
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
