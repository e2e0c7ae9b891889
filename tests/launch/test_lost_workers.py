"""Runs that go on when a worker is lost."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import BadInput, PeerLost, WorkersFailed
from shoal.launch.here.processes import ProcessExit
from shoal.launch.losses.failures import report_failure
from shoal.launch.losses.lost_workers import (
    LossPolicy,
    LostWorker,
    RunResult,
    SampleShares,
    Tolerance,
    losses_at_end,
    run_report,
    taking_back,
    tolerance_of,
)
from shoal.runtime.files import StepCount
from shoal.runtime.memory_limit import OutOfMemoryKills
from shoal.runtime.run_dir import RunDir, read
from shoal.strategy.strategy import parse
from tests import forked
from tests.launch.helpers import Screen
from tests.launch.helpers import run as launched

QUORUM = Tolerance("ps(quorum=0.75)")
IMPORT = (
    "from shoal.errors import BadInput, PeerLost\n"
    "from shoal.launch.losses.failures import report_failure\n"
    "from pathlib import Path\n"
    "from shoal.runtime.run_dir import RunDir\n"
    "run_dir = RunDir(Path(run_dir))\n"
    "def fail(error, status=1): report_failure(run_dir, rank, error); sys.exit(status)\n"
    "def wait_exited(other):\n"
    "    while not run_dir.has_exited(other): time.sleep(0.005)\n"
)


def run(script: str, workers: int, tolerance: Tolerance = QUORUM) -> Screen:
    return launched(IMPORT + textwrap.dedent(script), workers, tolerance=tolerance)


def test_the_others_go_on_when_one_is_killed_and_the_end_says_who_is_missing() -> None:
    script = """
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        wait_exited(1)
        run_dir.write(run_dir.report(rank), {"rank": rank, "steps": 5 + rank})
    """
    screen = run(script, 3)
    ending = screen.result
    assert [(loss.rank, loss.how) for loss in ending.lost] == [(1, "was killed by SIGKILL")]
    first, missed, last = screen.err.splitlines()
    assert first.startswith("shoal: worker 1 was killed by SIGKILL after ")
    assert first.endswith(" s; the others go on, as ps(quorum=0.75) allows")
    assert missed == "shoal: worker 1 was lost before the first step; 7 steps were not trained"
    assert last == "shoal: finished by workers 0 and 2, without worker 1"
    assert ending.reports == ({"rank": 0, "steps": 5}, None, {"rank": 2, "steps": 7})


def test_an_error_in_the_code_of_one_worker_ends_the_run_though_another_was_lost() -> None:
    script = """
        if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
        wait_exited(0)
        if rank == 1: fail(ValueError("the seventh seal"))
        time.sleep(60)
    """
    with pytest.raises(WorkersFailed, match="the seventh seal") as caught:
        run(script, 3)
    assert caught.value.rank == 1


def test_when_all_are_lost_the_first_loss_is_reported() -> None:
    script = """
        if rank == 1:
            wait_exited(0)
            fail(PeerLost(1, 0, "a push"))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with pytest.raises(WorkersFailed, match="worker 0 was killed by SIGKILL"):
        run(script, 2)


# ----------------------------------------------------------------------------- the decision


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def policy(run_dir: RunDir, said: list[str]) -> LossPolicy:
    return LossPolicy(run_dir, 2, Tolerance("hogwild", restarts=1), said.append)


def ends(policy: LossPolicy, rank: int, returncode: int = -9) -> bool:
    return policy.survives(ProcessExit(rank, returncode, 0))


def decide(run_dir: RunDir, returncode: int, error: Exception | None, **options: Any) -> bool:
    if error is not None:
        report_failure(run_dir, 1, error)
    policy = LossPolicy(run_dir, 3, Tolerance("hogwild", **options), print)
    return ends(policy, 1, returncode)


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_planned_kill_is_none_for_memory(
    run_dir: RunDir, said: list[str], monkeypatch: pytest.MonkeyPatch, is_planned: bool
) -> None:
    monkeypatch.setattr(OutOfMemoryKills, "has_struck", lambda kills: True)
    options = (Tolerance("hogwild", restarts=1), said.append, lambda exit: is_planned)
    assert ends(LossPolicy(run_dir, 2, *options), 1)
    assert ("out-of-memory" in said[0]) is not is_planned


@pytest.mark.parametrize(
    ("returncode", "error", "goes_on"),
    [
        (0, None, True),
        (-9, None, True),
        (-11, None, True),  # a crash of native code
        (1, None, False),  # it exited, for an unknown reason
        (1, PeerLost(1, 2, "a pull"), True),
        (1, ConnectionResetError("connection reset by peer"), True),
        (1, ValueError("boom"), False),
        (2, BadInput("boom"), False),
    ],
)
def test_what_counts_as_a_loss(
    run_dir: RunDir, returncode: int, error: Exception | None, goes_on: bool
) -> None:
    assert decide(run_dir, returncode, error) == goes_on
    assert run_dir.has_exited(1) and not run_dir.has_exited(0)
    note = json.loads(run_dir.exited(1, 0).read_text())
    assert note["returncode"] == returncode
    assert note["signal"] == {-9: "SIGKILL", -11: "SIGSEGV"}.get(returncode)


def test_workers_that_others_need_or_have_not_met_yet_are_not_survived(run_dir: RunDir) -> None:
    assert not decide(run_dir, -9, None, needed=(1,))
    assert not decide(run_dir, -9, None, from_start=False)
    run_dir.all_joined.touch()
    assert decide(run_dir, -9, None, from_start=False)


@pytest.mark.parametrize(
    ("strategy", "needed", "takes_back"),
    [
        ("ps(quorum=0.75)", (), True),
        ('ps(mode="async")', (), True),
        ("ps(staleness=1)", (), True),
        ('ps(placement="rank0", quorum=0.5)', (0,), True),
        ("ps(quorum=0.5) + pp(3)", (), False),
        ('ps(mode="async", placement="rank0") + pp(3)', (0, 1, 2), False),
        ('gossip(mode="async")', (), True),
        ("hogwild", (), True),
    ],
)
def test_strategies_that_survive_losses(
    strategy: str, needed: tuple[int, ...], takes_back: bool
) -> None:
    found = tolerance_of(parse(strategy), 3)
    apart = strategy.startswith("ps") and "+" not in strategy
    shares = SampleShares(turns=3 if strategy == "hogwild" else 1)
    wanted = Tolerance(str(parse(strategy)), needed, from_start=apart, shares=shares)
    assert found == wanted
    if takes_back:
        assert parse(strategy).taking_back(3) == parse(strategy)
        found = tolerance_of(parse(strategy), 3, restarts=5)
        assert found == replace(wanted, from_start=True, restarts=5)


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "zero(2)", "ps", "ps(quorum=1)", "ps(staleness=0)", "gossip", "single"),
        *("mapreduce", "localsgd", "tp(2)", "ps(quorum=1) + pp(2)"),
        'ps(placement="workers", mode="async")',
    ],
)
def test_strategies_that_do_not(strategy: str) -> None:
    assert tolerance_of(parse(strategy), 4) is None
    with pytest.raises(BadInput, match="cannot take a worker back") as caught:
        tolerance_of(parse(strategy), 4, restarts=1)
    assert str(parse(strategy)) in str(caught.value)


def test_the_end_says_what_lost_workers_have_not_trained() -> None:
    def at_end(lost: LostWorker, reports: Sequence[Any] = ({"steps": 300}, None)) -> list[str]:
        *lines, last = losses_at_end([lost], 2, reports)
        assert last == "finished by worker 0, without worker 1"
        return lines

    at_once = LostWorker(1, "was killed by SIGKILL", 1.0)
    lost = replace(at_once, lost_at=19)
    assert at_end(lost) == ["worker 1 was lost at step 20; 281 steps were not trained"]
    assert at_end(lost, [None, None]) == []
    first = "worker 1 was lost before the first step"
    assert at_end(at_once) == [f"{first}; 300 steps were not trained"]
    assert at_end(replace(at_once, came_too_late=True)) == [
        f"{first} and came back too late, when the others had finished; 300 steps were not trained"
    ]
    assert losses_at_end([], 2, [{"steps": 300}, None]) == []
    without = ["finished by worker 0, without workers 1, 2 and 3"]
    assert losses_at_end([lost], 4, [], absent=[2, 3]) == without


def test_a_worker_that_takes_batches_in_turns_misses_only_its_own() -> None:
    tolerance = tolerance_of(parse("hogwild"), 2)
    assert tolerance is not None
    lost = LostWorker(1, "was killed by SIGKILL", 1.0, lost_at=28, shares=tolerance.shares)
    assert lost.in_words(288) == "worker 1 was lost at step 30; 130 steps were not trained"
    assert lost.document(289)["not_trained"] == 130.5  # the last batch is split
    back = replace(lost, away="returned", away_s=2.0, step=40)
    words = "at step 30 and came back after 2.0 s; 6 steps were not trained"
    assert back.in_words().endswith(words)


# -------------------------------------------------------------------------- started again


def test_a_killed_worker_is_started_again_so_many_times_in_all_and_the_end_tells_of_it() -> None:
    script = """
        incarnation = int(os.environ.get("SHOAL_INCARNATION", "0"))
        if rank == 1 and incarnation < 3: os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            run_dir.note_return(1, incarnation, {"step": 61, "lost_at": 49})
        while not os.path.exists(run_dir.back(1, 3)): time.sleep(0.005)
        run_dir.write(run_dir.report(rank), {"rank": rank, "steps": 5})
    """
    screen = run(script, 2, Tolerance("ps(quorum=0.5)", restarts=3))
    ending = screen.result
    assert not ending.lost and [worker.rank for worker in ending.returned] == [1, 1, 1]
    lines = screen.err.splitlines()
    for number in (1, 2, 3):
        when = r"after [0-9.]+ s" if number == 1 else r"[0-9.]+ s after it was started again"
        assert re.match(f"shoal: worker 1 was killed by SIGKILL {when}; it is", lines[number - 1])
        assert lines[number - 1].endswith(f"; it is started again ({number} of 3)")
    assert lines[3].endswith("was killed by SIGKILL and was started again, and did not come back")
    assert "shoal: worker 1 was lost at step 50 and came back after " in lines[-1]
    assert lines[-1].endswith(" s; 12 steps were not trained")


def test_one_that_comes_back_when_the_others_have_finished_is_lost(
    run_dir: RunDir, policy: LossPolicy, said: list[str]
) -> None:
    count = StepCount(run_dir.steps(1))
    count.note(19)
    count.close()
    assert ends(policy, 1) and policy.restarts(ProcessExit(1, -9, 0))
    StepCount(run_dir.steps(1)).close()  # of the new process: it keeps what it finds
    assert ends(policy, 0, 0)
    run_dir.late(1, 1).touch()
    assert ends(policy, 1, 0)
    assert policy.returned() == [] and len(said) == 1
    (lost,) = policy.lost
    assert (lost.rank, lost.lost_at, lost.came_too_late) == (1, 19, True)


def test_one_that_was_never_there_comes_too_late_to_take_part(
    run_dir: RunDir, policy: LossPolicy, said: list[str]
) -> None:
    policy.note_absent(1)
    assert policy.absent == (1,)
    assert policy.join("a") == 1
    answer = {"sentence": "worker 1 of 2 is started", "rank": 1, "incarnation": 1}
    assert read(run_dir.join_answer("a")) == answer
    assert ends(policy, 0, 0)
    run_dir.late(1, 1).touch()
    assert ends(policy, 1, 0)
    assert said[1:] == ["worker 1 came too late to take part: the others had finished"]
    assert not policy.lost and not policy.returned() and policy.absent == (1,)
    (joined,) = policy.joined()
    assert (joined.rank, joined.step, joined.came_too_late) == (1, None, True)


def test_none_is_started_when_a_worker_has_finished_its_training(
    run_dir: RunDir, policy: LossPolicy
) -> None:
    policy.note_absent(1)
    run_dir.mark(run_dir.training(0))
    run_dir.mark_finished(0)  # its process has not exited yet
    assert policy.join("a") is None
    answer = read(run_dir.join_answer("a")) or {}
    assert answer["sentence"] == "no worker is started: the first workers have finished"
    run_dir.mark(run_dir.training(0))  # the script calls shoal.run again
    assert policy.join("b") == 1


def test_a_lost_worker_that_was_asked_for_and_comes_too_late_stays_lost(
    run_dir: RunDir,
) -> None:
    policy = LossPolicy(run_dir, 2, Tolerance("hogwild"), print)
    assert ends(policy, 1)
    assert policy.join("a") == 1 and not policy.lost
    assert policy.join("b") is None
    answer = read(run_dir.join_answer("b")) or {}
    assert answer["sentence"] == "no worker is started: all workers are there"
    run_dir.late(1, 1).touch()
    assert ends(policy, 1, 0)
    assert [(lost.rank, lost.came_too_late) for lost in policy.lost] == [(1, True)]


def test_a_worker_is_not_started_again_when_another_has_finished(
    policy: LossPolicy, said: list[str]
) -> None:
    assert ends(policy, 0, 0)
    assert ends(policy, 1) and not policy.restarts(ProcessExit(1, -9, 0))
    assert said[-1].endswith("; the others go on, as hogwild allows")


@pytest.mark.parametrize("strategy", ["ps", "ps(staleness=0)", "ps(quorum=1)"])
def test_where_all_workers_are_waited_for_those_that_are_there_are(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = taking_back(parse(strategy), 4)
    assert chosen == parse("ps(quorum=4)")
    assert f"shoal: {strategy} runs as ps(quorum=4): " in capsys.readouterr().err
    assert tolerance_of(chosen, 4, restarts=1) is not None
    for other in ("ddp", 'ps(update="worker")', 'ps(placement="workers")', "ps + pp(2)"):
        assert taking_back(parse(other), 4) == parse(other)
    assert not capsys.readouterr().err


# -------------------------------------------------------------------------- interactive ones


FORKED = """
import os, signal, sys, time
from shoal.launch.here.local import LaunchSpec, launch
from shoal.launch.losses.lost_workers import Tolerance
from shoal.runtime.config import RunConfig

def body(config):
    run_dir, rank = os.environ["SHOAL_RUN_DIR"], int(os.environ["SHOAL_RANK"])
    assert str(config.run_dir.path) == run_dir and config.rank == rank
    assert os.stat(run_dir + "/secret").st_mode & 0o777 == 0o600
    if MODE == "kill" and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    while MODE == "kill" and not config.run_dir.has_exited(1): time.sleep(0.005)
    while MODE != "kill" and not os.path.exists(run_dir + "/ready"): time.sleep(0.005)
    if MODE == "dead server": time.sleep(60)

SERVER = '''
import os, sys, time
open(os.environ["SHOAL_RUN_DIR"] + "/ready", "w").close()
sys.exit("no room left") if os.environ["MODE"] == "dead server" else time.sleep(60)
'''
MODE = sys.argv[1]
os.environ["MODE"] = MODE
launch(LaunchSpec((), 3, RunConfig.from_environment(), int(MODE != "kill"),
                  [sys.executable, "-c", SERVER], Tolerance("hogwild"), body=body))
"""


@pytest.mark.parametrize(
    ("mode", "status", "says"),
    [
        ("kill", 0, "shoal: finished by workers 0 and 2, without worker 1"),
        ("server", 0, ""),
        ("dead server", 1, "server 0 ended with exit status 1 while workers needed it:\nno room"),
    ],
)
def test_forked_workers(mode: str, status: int, says: str) -> None:
    done = forked.run([sys.executable, "-c", FORKED, mode], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert says in done.stderr


# ------------------------------------------------------------------------------ the report


def test_reports_by_rank_and_none_for_what_cannot_be_read(run_dir: RunDir, tmp_path: Path) -> None:
    run_dir.write(run_dir.report(0), {"steps": 3})
    (tmp_path / "report-1.json").write_text("[1, 2")
    (tmp_path / "report-2.json").write_text("[1, 2]")
    assert run_dir.read_reports(4) == [{"steps": 3}, None, None, None]


def test_the_report_of_a_run() -> None:
    ranks = (8, 10.0), None, (9, 2.5)
    reports = tuple(rank and {"steps": rank[0], "samples_per_s": rank[1]} for rank in ranks)
    lost = LostWorker(1, "was killed by SIGKILL", 1.5, lost_at=4)
    lost_again = LostWorker(1, "was killed by SIGKILL", 1.0, away="returned")
    found = run_report(
        "ps(quorum=0.5)", 3, RunResult(4.0, (lost,), reports, returned=(lost_again,))
    )
    (shown,) = found.pop("lost")
    assert {"rank": 1, "lost_at": 4, "not_trained": 5, "is_covered": False}.items() <= shown.items()
    assert found == {
        **{"strategy": "ps(quorum=0.5)", "workers": 3, "steps": 9, "seconds": 4.0},
        **{"samples_per_s": 12.5, "came_back": [], "joined": [], "absent": []},
        **{"servers_lost": [], "without_service_s": 0.0, "ranks": list(reports)},
    }
