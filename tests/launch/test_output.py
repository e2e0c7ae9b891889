from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest

from shoal.launch.here.output import LineForwarder, OutputPump, print_lines, progress_lines
from tests.launch.helpers import Screen


def test_lines_are_whole_and_prefixed() -> None:
    screen = Screen()
    lines = LineForwarder(screen, "[1] ", False)
    for data in (b"one\ntw", b"o\n\nthr", b"ee"):
        lines.feed(data)
    assert screen.out == "[1] one\n[1] two\n[1] \n"
    lines.close()
    assert screen.out.endswith("[1] three\n") and screen.err == ""


def test_a_character_cut_in_two_and_bytes_that_are_no_text() -> None:
    screen = Screen()
    lines = LineForwarder(screen, "", True)
    lines.feed("é".encode()[:1])
    lines.feed("é".encode()[1:] + b" \xff\xfe\x00\n")
    assert screen.err == "é \\xff\\xfe\x00\n"


def test_an_endless_line_is_passed_on_in_pieces() -> None:
    screen = Screen()
    lines = LineForwarder(screen, "", False)
    for _ in range(40):
        lines.feed(b"x" * 65536)
    assert len(screen.out) > 2**20


def test_the_tail_is_the_last_100_lines() -> None:
    lines = LineForwarder(Screen(), "", True)
    for number in range(250):
        lines.feed(b"%d\n" % number)
    lines.feed(b"".join(b"%d\n" % number for number in range(250, 400)))
    assert lines.tail().splitlines() == [str(number) for number in range(300, 400)]


def test_records_that_are_no_objects_are_ignored() -> None:
    records: list[dict[str, Any]] = []
    sink = progress_lines(records.append)
    sink.feed(b'{"step": 1}\nnot json\n[1]\n\n\xff\n' + b"[" * 60000 + b"\n" + b'{"step"')
    sink.feed(b': 2}\n{"a": "' + b"x" * (1 << 20))
    sink.feed(b'"}\n{"step": 3}\n{"step": 4')
    sink.close()
    assert records == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_terminal_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_lines("caf\u00e9\n", False)
    assert raw.getvalue() == b"caf\\xe9\n"


def test_the_pump_goes_on_reading_when_no_output_is_taken() -> None:
    errors: list[Exception] = []

    def refuse(text: str, is_stderr: bool) -> None:
        raise OSError("no space")

    read, write = os.pipe()
    with OutputPump(errors.append) as pump:
        pump.add(read, LineForwarder(refuse, "", False))
        pump.start()
        for _ in range(10):
            os.write(write, b"x" * 65535 + b"\n")
        os.close(write)
    assert [str(error) for error in errors] == ["no space"]


@pytest.mark.parametrize("start", [True, False])
def test_the_pump_ends_with_what_is_there_while_a_pipe_is_still_held(start: bool) -> None:
    screen = Screen()
    read, write = os.pipe()
    with OutputPump(lambda error: None) as pump:
        pump.add(read, LineForwarder(screen, "", False))
        if start:
            pump.start()
        os.write(write, b"a\nb")
    os.close(write)
    assert screen.out == "a\nb\n"
