"""A process that training forks ends as an interpreter does, and runs nothing of the worker's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from shoal.runtime.parent_death import forks_end_here


def say_why() -> None:
    sys.exit("no such file")


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (lambda: None, 0),
        (sys.exit, 0),
        (lambda: sys.exit(0), 0),
        (lambda: sys.exit(3), 3),
        (say_why, 1),
        (lambda: 1 // 0, 1),
    ],
)
def test_a_fork_ends_where_it_would_leave(act: Callable[[], object], status: int) -> None:
    with forks_end_here():
        child = os.fork()
        if not child:
            act()
    if not child:
        os._exit(99)  # it left
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


def test_an_error_of_the_process_itself_passes() -> None:
    with pytest.raises(ZeroDivisionError), forks_end_here():
        raise ZeroDivisionError
