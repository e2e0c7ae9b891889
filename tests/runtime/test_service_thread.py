"""A thread that serves others and fails ends its process with a sentence."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import threading
from shoal.runtime.acceptor import service_thread
service_thread("shoal-store", lambda number: 1 // number, 0).start()
threading.Event().wait()
"""


def test_a_service_thread_that_fails_ends_its_process_with_a_sentence() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "ends: its thread shoal-store has failed (ZeroDivisionError" in line
