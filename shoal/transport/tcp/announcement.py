"""What a rank says of itself in the rendezvous before others connect to it.

    HOST PORT plain                 where it listens
    HOST PORT tls [FLAW]            under TLS; what is wrong with its own certificate, if anything

So files of TLS that only some hosts have, or a certificate that has expired, end all ranks at once,
and not those alone that try to connect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import TlsConfig
from shoal.transport.tcp.tls import own_flaw

_MOST_BYTES = 300


class Announcement(NamedTuple):
    """Where a rank listens, and how."""

    host: str
    port: int
    is_tls: bool
    flaw: str = ""

    def pack(self) -> bytes:
        kind = "tls" if self.is_tls else "plain"
        return f"{self.host} {self.port} {kind} {self.flaw}".strip().encode()[:_MOST_BYTES]


def announcement(host: str, port: int, tls: TlsConfig) -> Announcement:
    return Announcement(host, port, tls.is_mutual, own_flaw(tls, host))


def parse_announcement(text: bytes) -> Announcement:
    words = text[:_MOST_BYTES].decode(errors="replace").split(" ", 3)
    host, port, kind, flaw = [*words, *[""] * (4 - len(words))]
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ShoalError(f"a rank wrote {text[:60]!r} for its address into the rendezvous")
    printable = "".join(char if char.isprintable() else " " for char in flaw)
    return Announcement(host, int(port), kind == "tls", printable)


def check_tls(rank: int, said: Mapping[int, Announcement]) -> None:
    """BadInput, on all ranks, where files of TLS do not serve. `said` is by rank, with this one."""
    with_tls = [peer for peer in sorted(said) if said[peer].is_tls]
    without = [peer for peer in sorted(said) if not said[peer].is_tls]
    if with_tls and without:
        raise BadInput(
            f"rank {rank}: rank {with_tls[0]} has files of TLS and rank {without[0]} has not: give "
            "SHOAL_TLS_CERT, SHOAL_TLS_KEY and SHOAL_TLS_CA (`shoal keys tls`) to every host or to "
            "none"
        )
    for peer in with_tls:
        if said[peer].flaw:
            raise BadInput(
                f"rank {rank}: SHOAL_TLS_CA of rank {peer} does not vouch for its SHOAL_TLS_CERT "
                f"({said[peer].flaw}): make files for all hosts with `shoal keys tls`"
            )
