"""How a connection notices that the other host is silent: by probes of the kernel.

A worker that computes for long without a pause in Python still answers them.
"""

from __future__ import annotations

import socket

SILENT_HOST_S = 3  # a host from which nothing comes for so long is lost
LINK_SILENT_S = 30  # the same, where nothing but an answer depends on it
_PROBES = 3


def notice_silence(sock: socket.socket, silent_s: int = SILENT_HOST_S) -> None:
    """The connection breaks when the other host has been silent for so long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", silent_s // _PROBES),
        ("TCP_KEEPINTVL", silent_s // _PROBES),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", silent_s * 1000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
