"""Periodic checkpoints of servers, checked by the launcher before the start.

--server-checkpoint DIR:every=200
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shoal.errors import BadInput, ShardLost
from shoal.launch.checkpoint_option import read_folder, require_writable
from shoal.runtime.config import RunConfig
from shoal.server.saving.folder import complete_versions, remove_incomplete, require_unused
from shoal.strategy.strategy import Strategy

_OPTION_NAME = "--server-checkpoint"


def with_server_checkpoint(
    config: RunConfig, strategy: Strategy, text: str | None, resume: bool
) -> RunConfig:
    """The same with periodic checkpoints of servers: `text` is DIR or DIR:every=STEPS.

    BadInput where servers of this strategy cannot save, or not in DIR, which is made.
    """
    checkpoint = config.server_checkpoint
    if text is not None:
        folder, every = read_folder(_OPTION_NAME, text)
        checkpoint = replace(checkpoint, folder=folder, every=every or checkpoint.every)
    if checkpoint.folder is None:
        return config
    strategy.require_server_saves()
    require_writable(_OPTION_NAME, checkpoint.folder)
    if not resume:
        require_unused(complete_versions(checkpoint.folder), checkpoint.folder)
    return replace(config, server_checkpoint=replace(checkpoint, resume=resume))


@contextmanager
def saying_latest(folder: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Around a run: at its end, when no process of it is left, say what there is to go on from.

    Removes what was left half-written; not where the folder was refused, as that of another run.
    """
    try:
        yield
    except BadInput:
        raise
    except BaseException as error:
        latest = None if folder is None else _latest(folder)
        if latest is not None and not isinstance(error, ShardLost):  # which names it itself
            say(f"the latest checkpoint in {folder} is of step {latest}: --resume goes on from it")
        raise
    if folder is not None:
        latest = _latest(folder)
        none = f"there is no checkpoint in {folder}"
        say(none if latest is None else f"the latest checkpoint in {folder} is of step {latest}")


def _latest(folder: Path) -> int | None:
    remove_incomplete(folder)
    return next((version.number for version in complete_versions(folder)), None)
