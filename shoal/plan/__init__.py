"""How long things take: schedules, steps and strategies, without a runtime.

`shoal.plan` is also the function that ranks strategies: calling the package calls `shoal.planning`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module("shoal.planning").plan(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
