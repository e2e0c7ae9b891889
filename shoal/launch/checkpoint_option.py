"""Folders of checkpoints on the command line, checked by the launcher before the start.

--checkpoint DIR:every=200        the job saves there and goes on from there, by itself
--server-checkpoint DIR:every=200
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.server.saving.reason import in_words

OPTION_NAME = "--checkpoint"
_OPTION = re.compile(r":([A-Za-z_]+)=([^/]*)$")


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
    is_right = option is None or (option[1] == "every" and _is_steps(option[2]))
    if not folder or not is_right:
        raise BadInput(f"{option_name} takes DIR or DIR:every=STEPS, not {text!r}")
    return Path(folder).absolute(), None if option is None else int(option[2])


def _is_steps(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12 and int(text) > 0


def require_writable(option_name: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix="writing-") as file:
            file.write(b"\0")
    except OSError as error:
        raise BadInput(f"{option_name}: cannot write to {folder}: {in_words(error)}") from error
