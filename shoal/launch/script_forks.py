"""Processes that a script forks inside its training function."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def ending_forks() -> Iterator[None]:
    """A fork that the script made ends here: connections and threads are its parent's."""
    own_pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != own_pid:
            _end_fork(error)
        raise
    if os.getpid() != own_pid:
        _end_fork(None)


def _end_fork(error: BaseException | None) -> NoReturn:
    """As the interpreter would end it, without what the parent has to close."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        is_number = error.code is None or isinstance(error.code, int)
        status = int(error.code or 0) if is_number else 1
        if not is_number:
            print(error.code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)
