"""A start that takes long says what is started, once, and only while it is silent."""

from __future__ import annotations

import threading

from shoal.launch.here.watches import StartNotice, starting
from tests.launch.helpers import Screen


def test_a_silent_start_is_said_once() -> None:
    said: list[str] = []
    is_said = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        is_said.set()

    notice = StartNotice(Screen(), silent_s=0.01)
    with notice.saying(starting(3, 2), say, lambda: False):
        assert is_said.wait(60)
    assert said == ["starting 3 servers and 2 workers"]


def test_nothing_is_said_after_output_nor_when_all_workers_have_joined() -> None:
    said: list[str] = []
    screen = Screen()
    notice = StartNotice(screen, silent_s=600.0)
    with notice.saying(starting(1, 1), said.append, lambda: False):
        notice.write("step 1\n", False)
    assert screen.out == "step 1\n"
    has_asked = threading.Event()

    def has_started() -> bool:
        has_asked.set()
        return True

    with StartNotice(screen, silent_s=0.01).saying("starting", said.append, has_started):
        assert has_asked.wait(60)
    assert said == []
