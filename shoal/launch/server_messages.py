"""What a launcher gives to the agent of a server, and what the agent reports: JSON, one a line."""

from __future__ import annotations

from typing import Literal

import msgspec

from shoal.coordinator.interface import Listing
from shoal.launch.agent_messages import HostRefused
from shoal.runtime.decoders import lax_json_decoder


class ServerTask(msgspec.Struct, frozen=True):
    """One server, or the coordinator of replicated ones."""

    role: Literal["server", "coordinator"]
    folder: str  # where the launcher runs
    variables: dict[str, str]
    secret: str  # in hexadecimal
    address: str  # of this host
    index: int  # of the server
    servers: int  # of the run; those of a host share its cores


class ServerListens(msgspec.Struct, frozen=True, tag="listens"):
    """Where it is going to listen: it loads for seconds, and clients try again."""

    pid: int
    local: str  # a Unix socket of its host
    remote: str


class ServerOutput(msgspec.Struct, frozen=True, tag="output"):
    """Complete lines, each with its newline."""

    is_stderr: bool
    text: str


class ChainsChanged(msgspec.Struct, frozen=True, tag="chains"):
    """What the coordinator holds now."""

    listing: Listing


class ServerExited(msgspec.Struct, frozen=True, tag="exited"):
    """For good; the agent ends."""

    returncode: int


ServerMessage = ServerListens | ServerOutput | ChainsChanged | ServerExited | HostRefused


def read_server_message(line: str) -> ServerMessage:
    """msgspec.DecodeError where it is none."""
    decoder: msgspec.json.Decoder[ServerMessage] = lax_json_decoder(ServerMessage)  # type: ignore[arg-type]
    return decoder.decode(line)
