"""Python's `random` and numpy draw the same numbers on every worker, as torch does."""

from __future__ import annotations

import random
import sys
from contextlib import suppress

from shoal.errors import ShoalError
from shoal.runtime.config import RunConfig
from shoal.runtime.plain_training import refuse_plain_training


def seed_python(seed: int) -> None:
    """Seed the global generators of `random` and, where it is loaded, of numpy."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def seed_launched_worker() -> None:
    """In a worker of `shoal run`: also what the script draws before it calls `shoal.run`."""
    with suppress(ShoalError):  # shoal.run reports what is wrong with the configuration
        config = RunConfig.from_environment()
        if config.is_launched:
            with suppress(ImportError):
                import numpy  # noqa: F401  # torch loads it in any case
            seed_python(config.seed or 0)
            refuse_plain_training()
