"""What `import shoal` does in a worker of `shoal run`: it seeds generators, and guards training.

Python's `random`, numpy and torch draw the same numbers on every worker. A script that
trains without `shoal.run` is ended: each of its workers would do the same.
"""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.runtime.config import RunConfig
from shoal.runtime.wording import say

_hooks: list[Any] = []


def seed_python(seed: int) -> None:
    """Seed the global generators of `random` and, where they are loaded, of numpy and torch."""
    random.seed(seed)
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def seed_launched_worker() -> None:
    """Also what the script draws before it calls `shoal.run`."""
    with suppress(ShoalError):  # shoal.run reports what is wrong with the configuration
        config = RunConfig.from_environment()
        if config.is_launched:
            with suppress(ImportError):
                import numpy  # noqa: F401  # torch loads it in any case
            seed_python(config.seed or 0)
            refuse_plain_training()


def refuse_plain_training() -> None:
    """Until `allow_training`, the step of an optimizer ends one of several workers."""
    torch = sys.modules.get("torch")
    rank = None
    size = None
    with suppress(ShoalError):
        config = RunConfig.from_environment()
        rank = config.rank
        size = config.size
    if torch is None or _hooks or rank is None or size in (None, 1):
        return

    def refuse(*_: Any) -> None:
        script = getattr(sys.modules["__main__"], "__file__", None)
        is_known = script is None or "shoal" in Path(script).read_text(errors="replace")
        if is_known or torch.distributed.is_initialized():
            return
        if rank == 0:
            say(
                f"{script} trains without shoal.run(train): each of {size} workers would train the "
                "same model and write the same files. Call it, or start the script with python"
            )
        sys.exit(2)

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    _hooks.append(register_optimizer_step_pre_hook(refuse))


def allow_training() -> None:
    """`shoal.run` was called."""
    while _hooks:
        _hooks.pop().remove()
