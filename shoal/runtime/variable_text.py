"""How one environment variable is read and written; errors name the variable.

An empty variable counts as one that is not set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import BadInput
from shoal.runtime.run_dir import RunDir
from shoal.runtime.secret import parse_secret

_MAX_DIGITS = 18
_MAX_SECONDS = 1e8
MIN_LEASE_S = 0.5
_INTEGER = re.compile(rf"-?[0-9]{{1,{_MAX_DIGITS}}}")


def required_text(environ: Mapping[str, str], name: str) -> str:
    """The value of a variable that has to be set because others of the same launcher are."""
    if not environ.get(name):
        raise BadInput(f"{name} is not set, though the launcher's other variables are")
    return environ[name]


def required_count(environ: Mapping[str, str], name: str, at_least: int = 0) -> int:
    return parse_count(name, required_text(environ, name), at_least)


def parse_count(name: str, text: str, at_least: int = 0) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or int(text) < at_least:
        raise BadInput(f"{name} is {text!r}, which is not a whole number of at least {at_least}")
    return int(text)


class Codec(NamedTuple):
    """One type of variable: text to value, where a bad text is a BadInput, and back."""

    read: Callable[[str, str], Any]  # name and text of the variable
    write: Callable[[Any], str]


def _read_integer(name: str, text: str) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise BadInput(f"{name} is {text!r}, which is not a whole number")
    return int(text)


def _read_seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_SECONDS:
        raise BadInput(f"{name} is {text!r}, which is not a number of seconds above 0")
    return seconds


def _read_lease(name: str, text: str) -> float:
    seconds = _read_seconds(name, text)
    if seconds < MIN_LEASE_S:
        why = "a server that lives has to renew it in time"
        raise BadInput(f"{name} is {text!r}: a lease lasts {MIN_LEASE_S} s or longer, since {why}")
    return seconds


def _read_flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise BadInput(f"{name} is {text!r}: set it to 1 for yes or 0 for no")
    return text == "1"


def _read_words(name: str, text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _read_servers(name: str, text: str) -> int | tuple[str, ...]:
    addresses = _read_words(name, text)
    if not addresses:
        raise BadInput(f"{name} is {text!r}: set it to a number of servers or to their addresses")
    return parse_count(name, text) if text.isdigit() else addresses


def _write_servers(servers: int | tuple[str, ...]) -> str:
    return str(servers) if isinstance(servers, int) else ",".join(servers)


def _beginning(*beginnings: str) -> Codec:
    def read(name: str, text: str) -> str:
        if not text.startswith(beginnings):
            raise BadInput(f"{name} is {text!r}: use {', '.join(f'{b}…' for b in beginnings)}")
        return text

    return Codec(read, str)


def _read_start_method(name: str, text: str) -> str:
    if text not in ("fork", "spawn"):
        raise BadInput(f"{name} is {text!r}: use fork or spawn")
    return text


TEXT = Codec(lambda name, text: text, str)
PATH = Codec(lambda name, text: Path(text), str)
INTEGER = Codec(_read_integer, str)
COUNT = Codec(parse_count, str)
POSITIVE = Codec(lambda name, text: parse_count(name, text, at_least=1), str)
SECONDS = Codec(_read_seconds, repr)
LEASE = Codec(_read_lease, repr)
FLAG = Codec(_read_flag, lambda flag: str(int(flag)))
WORDS = Codec(_read_words, ",".join)
START_METHOD = Codec(_read_start_method, str)
SERVERS = Codec(_read_servers, _write_servers)  # how many, or their addresses
RENDEZVOUS = _beginning("file:///", "tcp://", "env://")
COORDINATOR = _beginning("etcd://", "etcds://", "unix:", "tcp:")  # etcds: TLS
RUN_DIR = Codec(lambda name, text: RunDir(Path(text)), lambda run_dir: str(run_dir.path))
SECRET = Codec(lambda name, text: parse_secret(text, name), lambda secret: secret.hex())


def variable(name: str, codec: Codec, default: Any = None, show: bool = True) -> Any:
    """A field of a frozen dataclass that stands for an environment variable."""
    return field(default=default, repr=show, metadata={"variable": name, "codec": codec})


@dataclass(frozen=True)
class LaunchedServer:
    """How SHOAL_SERVERS names a server: an address, or two where its host has one of its own.

    tcp:10.0.0.2:7001
    tcp:10.0.0.2:7001|unix:/tmp/shoal-ps-1234/server-0.sock|HOST      HOST as in SHOAL_HOST_ID
    """

    remote: str  # where it listens
    local: str = ""  # a socket for workers of its own host
    host: str = ""  # that host

    def encode(self) -> str:
        return "|".join((self.remote, self.local, self.host)) if self.local else self.remote

    def seen_from(self, host: str) -> str:
        return self.local if self.local and host == self.host else self.remote

    @classmethod
    def decode(cls, text: str) -> LaunchedServer:
        words = text.split("|")
        if len(words) not in (1, 3) or not all(words):
            raise BadInput(f"SHOAL_SERVERS has {text!r}: use ADDRESS or ADDRESS|SOCKET|HOST")
        return cls(*words)
