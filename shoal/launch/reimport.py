"""In a fork of a process that has loaded shoal: `import shoal` acts as the first one does.

The first import of shoal seeds the generators of a worker, and what a script draws before it does
not follow from the seed. So the module is taken out, and the import puts the same one back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from shoal.runtime.seeding import seed_launched_worker


def seed_when_imported() -> None:
    """From now on `import shoal` seeds once more."""
    sys.meta_path.insert(0, _Again(sys.modules.pop("shoal")))


class _Again(MetaPathFinder, Loader):
    """Finds a module that was loaded before, once."""

    def __init__(self, module: ModuleType):
        self._module = module
        self._spec = module.__spec__

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module.__name__:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        seed_launched_worker()
