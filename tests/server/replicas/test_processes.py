"""Server processes that are stopped. Pushes are one-hot integers."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.server.replicas.processes import processes
from tests.server.replicas.world import pulled, push_one_hot


@pytest.mark.whole
def test_a_head_that_was_stopped_for_three_leases_is_fenced(tmp_path: Path) -> None:
    with processes(tmp_path) as made:
        client = made.client()
        push_one_hot(client, 0, 0)
        made.signal(0, signal.SIGSTOP)
        began_s = time.monotonic()
        step = 1
        while time.monotonic() < began_s + 1.5:
            push_one_hot(client, step % 8, step)
            step += 1
        made.signal(0, signal.SIGCONT)
        for late in range(step, step + 8):
            push_one_hot(client, late % 8, late)
        weights = pulled(client)
        assert sum(weights) == -(step + 8)
        assert weights[8:] == [0.0] * len(weights[8:])
        client.close()
