"""A mistake that a script does not catch ends it as under `shoal run`: one sentence, status 2."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

from shoal.errors import BadInput


def end_with_sentence() -> None:
    """From now on; a hook of the script's own stays."""
    if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
        sys.excepthook = _hook


def add_line_of_script(error: BaseException) -> None:
    """Add the line of the script to a mistake that is reported in one sentence."""
    package = str(Path(__file__).parents[1])
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in f.filename
        and not f.filename.startswith((package, sys.base_prefix, "<"))
    ]
    if isinstance(error, BadInput) and frames:
        error.args = (f"{error} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})",)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, BadInput):
        sys.__excepthook__(kind, error, trace)
        return
    add_line_of_script(error)
    sys.stdout.flush()
    # torch's hook around this one, once there is a process group, keeps what is written to
    # sys.stderr and forgets it at an exit
    stream = sys.stderr if sys.excepthook is _hook else sys.__stderr__ or sys.stderr
    print(f"shoal: {error}", file=stream, flush=True)
    sys.exit(2)
