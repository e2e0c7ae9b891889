"""A script under `shoal run -n 2` that trains without Shoal: its workers would do the same."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.runtime.config import RunConfig

_hooks: list[Any] = []


def refuse_plain_training() -> None:
    """In a worker of `shoal run`: until `allow_training`, the step of an optimizer ends it."""
    torch, rank, size = sys.modules.get("torch"), None, None
    with suppress(ShoalError):  # shoal.run reports what is wrong with the configuration
        config = RunConfig.from_environment()
        rank, size = config.rank, config.size
    if torch is None or _hooks or rank is None or size in (None, 1):
        return

    def refuse(*_: Any) -> None:
        script = getattr(sys.modules["__main__"], "__file__", None)
        is_known = script is None or "shoal" in Path(script).read_text(errors="replace")
        if is_known or torch.distributed.is_initialized():
            return
        if rank == 0:
            print(
                f"shoal: {script} trains without shoal.run(train): each of {size} workers would "
                "train the same model and write the same files. Call it, or start the script "
                "with python",
                file=sys.stderr,
                flush=True,
            )
        sys.exit(2)

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    _hooks.append(register_optimizer_step_pre_hook(refuse))


def allow_training() -> None:
    """`shoal.run` was called."""
    while _hooks:
        _hooks.pop().remove()
