from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import BadInput, WorkersFailed
from shoal.launch.here.local import LaunchSpec, launch
from shoal.runtime.config import RunConfig
from tests.launch.helpers import HOLD, Rope, run


def failure(script: str, workers: int, **options: Any) -> WorkersFailed:
    with pytest.raises(WorkersFailed) as caught:
        run(script, workers, **options)
    return caught.value


def spec(command: list[str], workers: int) -> LaunchSpec:
    return LaunchSpec(command, workers, RunConfig.from_environment())


def test_output_is_prefixed_by_rank_and_many_lines_keep_their_order() -> None:
    script = """
        sys.stdout.write("".join(f"{i}\\n" for i in range(100_000)))
        print("err", rank, file=sys.stderr)
        print("no newline", end="")
    """
    screen = run(script, 2)
    lines = screen.out.splitlines()
    for rank in (0, 1):
        assert [x for x in lines if x.startswith(f"[{rank}] ")] == [
            *(f"[{rank}] {i}" for i in range(100_000)),
            f"[{rank}] no newline",
        ]
    assert sorted(screen.err.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_the_environment_of_a_worker() -> None:
    script = """
        names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LAUNCHER_PID"]
        print(*(os.environ["SHOAL_" + name] for name in names), os.environ["OMP_NUM_THREADS"],
              os.environ["SHOAL_RENDEZVOUS"] == f"file://{run_dir}/store",
              oct(os.stat(run_dir).st_mode & 0o777), os.getsid(0) == os.getpid(),
              "SHOAL_PROGRESS_FD" in os.environ, sys.stdin.read() == "")
    """
    env = {"OMP_NUM_THREADS": "7", "SHOAL_PROGRESS_FD": "0"}
    pid = os.getpid()
    assert sorted(run(script, 2, env=env).out.splitlines()) == [
        f"[0] 0 2 0 2 {pid} 7 True 0o700 True False True",
        f"[1] 1 2 1 2 {pid} 7 True 0o700 True False True",
    ]
    assert " 3 True" in run(script, 1, env=env, threads=3).out
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f" {share} True" in run(script, 2, env={"OMP_NUM_THREADS": ""}).out


def test_progress_of_every_rank_and_how_it_has_ended() -> None:
    script = """
        from shoal.train.progress import open_progress
        from shoal.runtime.config import RunConfig
        send = open_progress(RunConfig.from_environment().progress_fd)
        os.write(int(os.environ["SHOAL_PROGRESS_FD"]), b"nonsense\\n")
        for step in range(100):
            send({"step": step, "of": rank, "metrics": {"loss": 0.5}})
    """
    records: list[dict[str, Any]] = []
    run(script, 2, on_progress=records.append)
    for rank in range(2):
        own = [record for record in records if record.get("of") == rank]
        assert [record["step"] for record in own] == list(range(100))
        assert own[0] == {"step": 0, "of": rank, "metrics": {"loss": 0.5}}
        assert {"rank": rank, "state": "finished"} in records


def test_workers_that_ignore_sigterm_and_their_children_are_killed(
    rope: Rope, tmp_path: Path
) -> None:
    script = f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        {HOLD.strip()}
        if os.fork() == 0:
            os.write(rope, b"x")
            time.sleep(60)
        while rank == 0 and not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.005)
        sys.exit(5) if rank == 0 else time.sleep(60)
    """

    def let_go() -> None:
        rope.wait_held(6)
        (tmp_path / "go").touch()

    helper = threading.Thread(target=let_go)
    helper.start()
    error = failure(script, 3, env={"ROPE": str(rope.path)})
    helper.join()
    assert (error.rank, error.exit_status) == (0, 5)
    rope.wait_released()


def test_an_error_in_write_ends_the_workers(rope: Rope) -> None:
    def refuse(text: str, is_stderr: bool) -> None:
        raise BrokenPipeError("head has seen enough")

    command = [sys.executable, "-c", "import time; print('x', flush=True); time.sleep(60)"]
    with pytest.raises(BrokenPipeError, match="enough"):
        launch(spec(command, 2), refuse)


@pytest.mark.parametrize(
    ("command", "workers", "says"),
    [
        (["no-such-program-here"], 2, "no program 'no-such-program-here'"),
        ([sys.executable, "no_script.py"], 2, "no script 'no_script.py'"),
        ([sys.executable, "-V"], 0, "0 workers"),
        ([], 1, "no command"),
    ],
)
def test_what_cannot_be_started_is_refused(command: list[str], workers: int, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        launch(spec(command, workers))


def test_a_program_that_does_not_start_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with pytest.raises(BadInput, match="cannot start"):
        launch(spec([str(program)], 2))


def test_it_works_in_a_thread_where_no_signal_can_be_caught() -> None:
    screens: list[str] = []
    thread = threading.Thread(target=lambda: screens.append(run("print('x')", 1).out))
    thread.start()
    thread.join()
    assert screens == ["x\n"]
