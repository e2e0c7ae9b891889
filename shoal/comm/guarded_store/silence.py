"""How a connection notices that the other host is silent: by probes of the kernel.

A worker that computes for long without a pause in Python still answers them.
"""

from __future__ import annotations

import socket

SILENT_HOST_S = 3  # a host from which nothing comes for so long is lost
_PROBE_S = 1


def notice_silence(sock: socket.socket) -> None:
    """The connection breaks when the other host has been silent for `SILENT_HOST_S`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _PROBE_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", SILENT_HOST_S),
        ("TCP_USER_TIMEOUT", SILENT_HOST_S * 1000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
