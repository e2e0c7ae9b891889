"""Folders of checkpoints on the command line, checked by the launcher before the start.

--checkpoint DIR:every=200        the job saves there and goes on from there, by itself
--server-checkpoint DIR:every=200
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shoal.errors import BadInput, ShardLost
from shoal.runtime.checkpoint_folders import (
    complete_versions,
    in_words,
    remove_incomplete,
    require_unused,
)
from shoal.runtime.config import RunConfig
from shoal.strategy.strategy import Strategy

OPTION_NAME = "--checkpoint"
_SERVER_OPTION_NAME = "--server-checkpoint"
_OPTION = re.compile(r":([A-Za-z_]+)=([^/]*)$")
_STEPS = re.compile(r":every=0*[1-9][0-9]{0,11}", re.ASCII)


def with_checkpoint(config: RunConfig, text: str | None) -> RunConfig:
    """The same with checkpoints of the job itself: `text` is DIR or DIR:every=STEPS."""
    if text is not None:
        folder, every = read_folder(OPTION_NAME, text)
        asked = replace(config.checkpoint, folder=folder, every=every or config.checkpoint.every)
        config = replace(config, checkpoint=asked)
    if config.checkpoint.folder is not None:
        require_writable(OPTION_NAME, config.checkpoint.folder)
    return config


def read_folder(option_name: str, text: str) -> tuple[Path, int | None]:
    """The folder and the steps between checkpoints, if given."""
    option = _OPTION.search(text)
    folder = text if option is None else text[: option.start()]
    if not folder or (option is not None and not _STEPS.fullmatch(option[0])):
        raise BadInput(f"{option_name} takes DIR or DIR:every=STEPS, not {text!r}")
    return Path(folder).absolute(), None if option is None else int(option[2])


def require_writable(option_name: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix="writing-") as file:
            file.write(b"\0")
    except OSError as error:
        raise BadInput(f"{option_name}: cannot write to {folder}: {in_words(error)}") from error


def with_server_checkpoint(
    config: RunConfig, strategy: Strategy, text: str | None, resume: bool
) -> RunConfig:
    """The same with periodic checkpoints of servers: `text` is DIR or DIR:every=STEPS.

    BadInput where servers of this strategy cannot save, or not in DIR, which is made.
    """
    checkpoint = config.server_checkpoint
    if text is not None:
        folder, every = read_folder(_SERVER_OPTION_NAME, text)
        checkpoint = replace(checkpoint, folder=folder, every=every or checkpoint.every)
    if checkpoint.folder is None:
        return config
    strategy.require_server_saves()
    require_writable(_SERVER_OPTION_NAME, checkpoint.folder)
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
