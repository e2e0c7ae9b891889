"""Tasks and messages of agents come from other hosts: what is none is one sentence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.errors import BadInput
from shoal.launch.hosts.agent_messages import HostTask, ProcessOutput, read_message, read_task

GIVEN: dict[str, Any] = {
    **{"folder": "/", "variables": {}, "secret": "00" * 32, "address": "::1", "command": ["a.py"]},
    **{"python": "python", "first_rank": 0, "workers": 2, "size": 4, "threads": 1, "cores": None},
    **{"master": "::1", "master_port": None, "shows_progress": False},
}
TASK = HostTask(**GIVEN)
DEEP = b"[" * 100_000


def forged(**changed: Any) -> bytes:
    return msgspec.json.encode({"type": "workers", **GIVEN, **changed})


def test_a_task_is_read_as_it_was_given() -> None:
    assert read_task(msgspec.json.encode(TASK)) == TASK


@pytest.mark.parametrize(
    "given",
    [b"", b"{}", DEEP, b'{"type":"workers","command":["\xff"]}', b'{"type":"workers","x":' + DEEP]
    + [forged(workers=count) for count in (-1, 0, 1 << 40, "x", 1.5)]
    + [forged(first_rank=-1), forged(master_port=0), forged(threads=0)],
)
def test_a_task_that_is_none_is_refused_in_one_sentence(given: bytes) -> None:
    with pytest.raises(BadInput, match="the agent of a host was given no task"):
        read_task(given)


@pytest.mark.parametrize("line", ["Traceback", '{"type":"output","x":' + DEEP.decode(), "\ud800"])
def test_a_line_that_is_no_message_is_output(line: str) -> None:
    assert read_message(line, 1) == ProcessOutput(1, True, f"{line}\n")
