"""Metadata of frames."""

from __future__ import annotations

import subprocess
import sys

MEET = """
import sys, threading
import msgspec
from shoal.server.protocol.frames import decode

sys.setswitchinterval(1e-6)

def meet(number):
    inner = msgspec.defstruct(f"Inner{number}", [("a", int), ("b", tuple[int, ...])])
    kind = msgspec.defstruct(f"Kind{number}", [("x", int), ("values", tuple[inner, ...])])
    sent, barrier, found = kind(1, (inner(1, (2,)),)), threading.Barrier(6), []

    def take():
        barrier.wait()
        found.append(decode(msgspec.msgpack.encode(sent), kind))

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [sent] * 6

for number in range(100):
    meet(number)
"""


def test_connections_that_meet_a_message_for_the_first_time_at_once() -> None:
    """In a process of its own: two threads that let msgspec look at a type at once crash it."""
    done = subprocess.run([sys.executable, "-c", MEET], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
