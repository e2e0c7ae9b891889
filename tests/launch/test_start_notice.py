"""A start that takes long says what is started, once, and only while it is silent."""

from __future__ import annotations

import threading

import pytest

from shoal.launch.here.watches import start_notice


@pytest.mark.parametrize("has_started", [False, True])
def test_a_silent_start_is_said_once(has_started: bool) -> None:
    said: list[str] = []
    is_over = threading.Event()

    def ask() -> bool:
        is_over.set()
        return has_started

    def say(line: str) -> None:
        said.append(line)

    with start_notice("starting 1 server", say, threading.Event(), ask, silent_s=0.01):
        assert is_over.wait(60)
    assert said == ([] if has_started else ["starting 1 server"])


def test_nothing_is_said_after_output() -> None:
    said: list[str] = []
    is_heard = threading.Event()
    with start_notice("starting", said.append, is_heard, lambda: False, silent_s=600.0):
        is_heard.set()
    assert said == []
