"""Server processes that are killed or stopped at named points. Pushes are one-hot integers."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.server.replicas.processes import processes
from tests.server.replicas.world import pulled, push_one_hot

POINTS = ("received", "validated", "logged", "replicated", "applied", "acknowledged")
OF_HEAD = [(0, f"push.{point}") for point in POINTS]
OF_OTHERS = [
    (replica, f"push.{point}") for replica in (1, 2) for point in ("replicated", "applied")
]


@pytest.mark.whole
@pytest.mark.parametrize(("replica", "point"), [*OF_HEAD, *OF_OTHERS])
def test_every_push_counts_once_when_a_replica_is_killed(
    tmp_path: Path, replica: int, point: str
) -> None:
    with processes(tmp_path, failpoints={replica: f"{point}:kill@3"}) as made:
        client = made.client()
        for step in range(8):
            push_one_hot(client, step, step)
        assert made.wait_dead(replica) == -signal.SIGKILL
        assert pulled(client)[:9] == [-1.0] * 8 + [0.0]
        client.close()


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
