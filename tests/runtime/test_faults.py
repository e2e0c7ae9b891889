from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import Faults, busy_s, check_faults, faults_of, read_kills, read_slow


def test_what_the_command_line_says_is_what_a_worker_reads() -> None:
    config = RunConfig(slow=("1:4x", "3:2.5x"), kill=("3@50",))
    check_faults(config, 4)
    env = config.to_environment()
    assert env == {"SHOAL_SLOW": "1:4x,3:2.5x", "SHOAL_KILL": "3@50"}
    faults = [faults_of(RunConfig.from_environment(env), rank, 4) for rank in range(4)]
    assert faults == [None, Faults(4.0), None, Faults(2.5, 50)]
    assert faults_of(RunConfig(), 0, 4) is None


@pytest.mark.parametrize(
    ("read", "texts", "says"),
    [
        (read_slow, ["4:2x"], "there is no worker 4, the last of 4 workers is 3"),
        *((read_slow, [text], "1 to 1000 times slower") for text in ("1:0.5x", "1:9999x")),
        *(
            (read_slow, [text], "--slow takes a text such as 1:4x")
            for text in ("1", "1:4", "-1:4x", "1:4x ", "", "1:infx", "1:1e9x", "¹:4x")
        ),
        (read_slow, ["1:2x", "1:3x"], "--slow names worker 1 twice"),
        (read_kills, ["4@5"], "there is no worker 4"),
        *(
            (read_kills, [text], "--kill takes a text such as 2@50")
            for text in ("2", "2@", "2@-1", "2:50", "a@1")
        ),
    ],
)
def test_nonsense_is_refused(read: Callable[..., object], texts: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read(texts, 4)


def test_texts_about_servers_are_read_apart() -> None:
    kills = ["2@5", "server:1@50", "server:1@90"]
    assert read_kills(kills, 3) == ((2, 5),)
    assert read_kills(kills, 2, "server") == ((1, 50), (1, 90))
    assert read_slow(["1:4x", "server:0:2.5x"], 2, "server") == {0: 2.5}
    with pytest.raises(BadInput, match="this strategy starts no servers"):
        check_faults(RunConfig(kill=("server:0@5",)), 2, 0)
    with pytest.raises(BadInput, match="server 1 at step 5 twice"):
        read_kills(["server:1@5", "server:1@5"], 2, "server")


def test_a_slow_worker_sleeps_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    times = iter([10.0, 10.5, 20.0, 20.25])
    run = Faults(slow=4.0).around(lambda a, b: a + b, lambda: 1, lambda: next(times))
    assert (run(1, 2), run(3, 4)) == (3, 7)
    assert slept == [1.5, 0.75]


def test_a_worker_is_killed_before_its_step_and_not_earlier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = iter([1, 2, 3])
    ran = []
    killed = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append((number, len(ran))))
    run = Faults(kill_at=3).around(lambda: ran.append(1), lambda: next(steps), lambda: 0.0)
    for _ in range(3):
        run()
    assert killed == [(9, 2)]


def test_computing_counts_and_waiting_for_others_does_not() -> None:
    """Of the time that passes, what is neither computing nor waiting for a core is left out."""
    began_s = time.monotonic()
    began_busy_s = busy_s()
    threading.Event().wait(0.3)
    waited_busy_s = busy_s()
    assert waited_busy_s - began_busy_s < time.monotonic() - began_s - 0.15
    began_cpu_s = time.thread_time()
    while time.thread_time() - began_cpu_s < 0.05:
        pass
    assert busy_s() - waited_busy_s >= 0.05
