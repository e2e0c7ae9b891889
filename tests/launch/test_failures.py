from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shoal.errors import BadInput, CheckFailed, PeerLost, StrategyError, WorkersFailed
from shoal.launch.losses.failures import (
    FailureReport,
    ProcessFailure,
    end_with_sentence,
    first_failure,
    launch_error,
    read_failure,
    report_failure,
)
from shoal.runtime.run_dir import RunDir

MS = 1_000_000
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]"


def reported(
    rank: int, at_ms: int, lost_peer: bool = False, exits_at_ms: int = 900
) -> ProcessFailure:
    report = FailureReport(at_ms * MS, 1, "", f"Traceback of {rank}\n", lost_peer)
    return ProcessFailure(rank, 1, exits_at_ms * MS, report)


def ended(rank: int, at_ms: int, returncode: int, stderr: str = "") -> ProcessFailure:
    return ProcessFailure(rank, returncode, at_ms * MS, None, stderr)


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        # the time of the report counts, not that of the exit
        ([reported(0, 20, exits_at_ms=30), reported(1, 10, exits_at_ms=800)], 1),
        # SIGKILL, noticed after its peers have reported the loss
        ([reported(0, 50, lost_peer=True), ended(1, 80, -9), reported(2, 51, lost_peer=True)], 1),
        # the same with errors that we do not know as echoes
        ([reported(0, 50), ended(1, 80, -9)], 1),
        # an error long before the kill came first
        ([reported(0, 50), ended(1, 600, -9)], 0),
        # an exit without a report, noticed after echoes
        ([reported(0, 50, lost_peer=True), ended(1, 80, 3)], 1),
        # echoes in stderr only
        ([ended(0, 50, 1, f"RuntimeError: {GLOO}"), ended(1, 80, 1, "ValueError: boom")], 1),
        # a peer that aborts because of the loss
        ([reported(0, 50), ended(1, 60, -6, f"terminate called\n what(): {GLOO}")], 0),
        ([reported(0, 50, lost_peer=True), ended(1, 60, -11)], 1),
        # nothing but echoes: the earliest
        ([reported(0, 50, lost_peer=True), reported(1, 40, lost_peer=True)], 1),
        ([ended(1, 50, 1), ended(0, 50, 1)], 0),
    ],
)
def test_the_first_failure_is_the_earliest_that_is_no_consequence(
    failures: list[ProcessFailure], first: int
) -> None:
    assert first_failure(failures).rank == first
    assert first_failure(list(reversed(failures))).rank == first


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_report_is_written_as_a_whole_and_the_first_one_stays(tmp_path: Path) -> None:
    report_failure(RunDir(tmp_path), 2, raised(ValueError("boom")))
    report_failure(RunDir(tmp_path), 2, raised(KeyError("later")))
    report = read_failure(RunDir(tmp_path), 2)
    assert report is not None and report.exit_status == 1 and not report.sentence
    assert report.traceback.startswith("Traceback") and "ValueError: boom" in report.traceback
    assert [path.name for path in tmp_path.iterdir()] == ["failure-2.json"]


def in_context(error: Exception, context: Exception | None = None) -> Exception:
    """Raised while the other one was handled, or from itself: a ring."""
    if context is None:
        error.__cause__ = error
    else:
        error.__context__ = context
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (in_context(ValueError("no gradient"), RuntimeError(GLOO)), True),
        (in_context(ValueError("ring")), False),
        (RuntimeError(GLOO), True),
        (RuntimeError("[pair.cc:537] Read error [::1]:3: Connection reset by peer."), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (PeerLost(0, 1, "all_reduce"), True),
        (RuntimeError("shapes (3, 4) and (5, 6) do not fit"), False),
        (ValueError("Broken pipe"), False),
    ],
)
def test_echoes_are_known(tmp_path: Path, error: Exception, lost: bool) -> None:
    report_failure(RunDir(tmp_path), 0, raised(error))
    report = read_failure(RunDir(tmp_path), 0)
    assert report is not None and report.lost_peer is lost


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"time_ns": 1}', '{"time_ns": "x"}'])
def test_a_damaged_report_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "failure-0.json").write_text(text)
    assert read_failure(RunDir(tmp_path), 0) is None and read_failure(RunDir(tmp_path), 1) is None


def test_a_report_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    report_failure(RunDir(tmp_path / "missing"), 0, ValueError("boom"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (StrategyError("tp(3) does not divide 4"), "tp(3) does not divide 4"),
        (CheckFailed("the loss is nan"), "worker 0 failed (exit status 1):\nthe loss is nan"),
    ],
)
def test_what_one_sentence_tells_has_no_traceback(
    tmp_path: Path, error: Exception, says: str
) -> None:
    report_failure(RunDir(tmp_path), 0, raised(error))
    told = launch_error(ProcessFailure(0, 2, 0, read_failure(RunDir(tmp_path), 0)))
    assert isinstance(told, BadInput) is isinstance(error, BadInput) and str(told) == says


def test_texts() -> None:
    def text(failure: ProcessFailure) -> tuple[int, str]:
        error = launch_error(failure)
        assert isinstance(error, WorkersFailed) and str(error) == error.report
        return error.exit_status, error.report

    assert text(reported(2, 0)) == (1, "worker 2 failed (exit status 1):\nTraceback of 2")
    assert text(ended(2, 0, -9, "noise")) == (137, "worker 2 was killed by SIGKILL")
    crash = ended(0, 0, -signal.SIGSEGV, "Fatal Python error")
    assert text(crash) == (139, "worker 0 was killed by SIGSEGV:\nFatal Python error")
    assert text(ended(1, 0, 3, "oh")) == (3, "worker 1 failed (exit status 3):\noh")
    assert text(ended(1, 0, 3))[1].endswith("it wrote nothing to stderr")


@pytest.mark.parametrize("has_group", [False, True])
def test_the_sentence_is_printed_also_around_a_process_group_of_torch(
    has_group: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch has a hook around ours then, which forgets what was written before an exit."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    end_with_sentence()
    if has_group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(BadInput, BadInput("no key"), None)
    assert ended.value.code == 2
    assert capfd.readouterr().err == "shoal: no key\n"
