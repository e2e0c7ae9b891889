"""A process whose lines are asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from shoal.errors import BadInput
from shoal.launch.managers.polled_process import PolledProcess

WAIT_S = 30.0
NAME = "first"


@pytest.fixture
def process() -> Iterator[PolledProcess]:
    process = PolledProcess()
    yield process
    process.end()


def start(process: PolledProcess, program: str, given: bytes = b"") -> None:
    process.start(NAME, ["/bin/sh", "-c", program], dict(os.environ), given)


def read_all(process: PolledProcess) -> tuple[list[str], int]:
    lines: list[str] = []
    while True:
        more, status = process.read(NAME, WAIT_S)
        lines += more
        if status is not None:
            return lines, status


def test_lines_come_in_order_and_the_status_last(process: PolledProcess) -> None:
    start(process, "cat; echo two >&2; exit 3", b"one\n")
    assert read_all(process) == (["one", "two"], 3)


def test_more_lines_than_are_kept_wait_for_their_reader(process: PolledProcess) -> None:
    start(process, "yes 0123456789012345678901234567890123456789 | head -n 60000")
    lines, status = read_all(process)
    assert (len(lines), status) == (60000, 0)


def test_signals_reach_it(process: PolledProcess) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        start(process, "echo started; exec sleep 60")
        assert process.read(NAME, WAIT_S) == (["started"], None)
        process.send_signal(NAME, number)
        assert process.read(NAME, WAIT_S) == ([], -number)


def test_another_start_ends_the_earlier_process(process: PolledProcess) -> None:
    start(process, "echo $$; exec sleep 60")
    (line,), _ = process.read(NAME, WAIT_S)
    start(process, "echo second")
    with pytest.raises(ProcessLookupError):
        os.kill(int(line), 0)
    assert read_all(process) == (["second"], 0)


def test_a_program_that_is_not_there_is_refused(process: PolledProcess) -> None:
    with pytest.raises(BadInput, match="cannot start /no/such/program"):
        process.start(NAME, ["/no/such/program"], {}, b"")


def test_calls_for_an_earlier_process_find_it_killed_and_leave_the_next_alone(
    process: PolledProcess,
) -> None:
    """So it is with an actor that Ray has restarted: it has no process yet."""
    assert process.read("earlier", WAIT_S) == ([], -signal.SIGKILL)
    start(process, "echo started; exec sleep 60")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
        process.send_signal("earlier", number)
    assert process.read("earlier", WAIT_S) == ([], -signal.SIGKILL)
    assert process.read(NAME, WAIT_S) == (["started"], None)
    assert process.read(NAME, 0.05) == ([], None)
