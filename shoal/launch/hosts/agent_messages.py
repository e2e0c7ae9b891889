"""What a launcher gives to the agent of a host, and what the agent reports: JSON, one a line."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec

from shoal.errors import BadInput
from shoal.runtime.decoders import decode_json
from shoal.server.coordinator import Listing

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """What processes of all roles are given."""

    folder: str  # where the launcher runs
    variables: dict[str, str]
    secret: str  # in hexadecimal
    address: str  # of this host


class HostTask(AgentTask, frozen=True, kw_only=True, tag="workers"):
    """The workers of one host."""

    command: list[str]
    python: str  # the launcher's interpreter, for which a host may have another
    first_rank: _Count
    workers: _Positive  # on this host
    size: _Positive  # of all workers
    threads: _Positive | None
    cores: _Positive | None
    master: str
    master_port: _Positive | None  # None: this is the first host, which finds a free one
    shows_progress: bool
    local_rank: _Count = 0  # of the first of these workers
    local_size: _Count = 0  # of all workers of this host; 0: these
    name: str = ""  # of the agent, in an elastic run


class ServerTask(AgentTask, frozen=True, kw_only=True, tag="server"):
    """One server, or the coordinator of replicated ones."""

    role: Literal["server", "coordinator"]
    index: _Count  # of the server
    servers: _Positive  # of the run; those of a host share its cores


class FoundPort(msgspec.Struct, frozen=True, tag="port"):
    """A port of the first host that is free, for the rendezvous."""

    port: int


class ProcessOutput(msgspec.Struct, frozen=True, tag="output"):
    """Complete lines, each with its newline."""

    rank: int  # of a worker, or the number of a server
    is_stderr: bool
    text: str


class WorkerProgress(msgspec.Struct, frozen=True, tag="progress"):
    record: dict[str, Any]


class FileWritten(msgspec.Struct, frozen=True, tag="file"):
    """A file of the run that a worker has written; `time_ns` in it is of the clock of its host."""

    name: str
    text: str
    clock_ns: int  # now


class ProcessEnded(msgspec.Struct, frozen=True, tag="exited"):
    """After all files of a worker; a server has exited for good, and its agent ends."""

    rank: int
    returncode: int
    age_ns: int  # hosts have different clocks


class HostRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The host cannot run the workers; a sentence for the user."""

    sentence: str


class ServerListens(msgspec.Struct, frozen=True, tag="listens"):
    """Where it is going to listen: it loads for seconds, and clients try again."""

    pid: int
    local: str  # a Unix socket of its host
    remote: str


class ChainsChanged(msgspec.Struct, frozen=True, tag="chains"):
    """What the coordinator holds now."""

    listing: Listing


WorkerMessage = FoundPort | WorkerProgress | FileWritten
ServerMessage = ServerListens | ChainsChanged
AgentMessage = WorkerMessage | ServerMessage | ProcessOutput | ProcessEnded | HostRefused
Task = HostTask | ServerTask


def read_message(line: str, rank: int) -> AgentMessage:
    """What is none, such as an error of the interpreter or the engine, is output of this one."""
    try:
        return decode_json(line, AgentMessage)  # type: ignore[arg-type]
    except ValueError:
        return ProcessOutput(rank, True, f"{line}\n")


def read_task(given: bytes) -> Task:
    """BadInput for what no launcher of this version gives."""
    try:
        return decode_json(given, Task)  # type: ignore[arg-type]
    except ValueError as error:
        raise BadInput(f"the agent of a host was given no task: {error}") from error


_sending = threading.Lock()


def send(message: AgentMessage) -> None:
    """By an agent, on its stdout, from several threads: each complete in a line of its own.

    A launcher that is gone cannot read it: then this agent is killed soon.
    """
    data = msgspec.json.encode(message) + b"\n"
    with _sending, suppress(BrokenPipeError):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
