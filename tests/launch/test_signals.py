"""A launcher in a process of its own is hit; whatever hits it, no process stays behind."""

from __future__ import annotations

import signal

import pytest

from tests.launch.helpers import Rope, launcher

SLEEP = """
    if rank == 0 and os.fork() == 0: os.write(rope, b"x")
    time.sleep(60)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: os.write(rope, b"t"))
os.write(rope, b"x")
time.sleep(60)
"""


def left_in_tmp(rope: Rope) -> list[str]:
    return [path.name for path in rope.path.parent.iterdir() if path != rope.path]


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, -signal.SIGINT),  # python ends itself so after KeyboardInterrupt
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
    ],
)
def test_a_signal_ends_everything(rope: Rope, number: signal.Signals, status: int) -> None:
    with launcher(SLEEP, 3, rope) as process:
        rope.wait_held(4)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=50)
    rope.wait_released()
    assert process.returncode == status
    assert (b"KeyboardInterrupt" in stderr) == (number == signal.SIGINT)
    assert left_in_tmp(rope) == []


def test_a_second_ctrl_c_kills_without_the_grace_period(rope: Rope) -> None:
    before = "from shoal.launch.here import supervisor; supervisor.TERM_S = 600\n"
    with launcher(STUBBORN, 2, rope, before) as process:
        rope.wait_held(4)
        process.send_signal(signal.SIGINT)
        rope.wait_bytes(2)  # both workers have got SIGTERM, and go on
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rope.wait_released()
    assert left_in_tmp(rope) == []


def test_an_ignored_signal_stays_ignored(rope: Rope) -> None:
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    with launcher("time.sleep(0.5)", 1, rope, before=ignore) as process:
        rope.wait_held(1)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=50) == 0
