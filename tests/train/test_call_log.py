"""A call that all ranks make, made by some of them only: found by counting, at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import Desync
from shoal.runtime.run_dir import RunDir
from shoal.server.consistency import Rule
from shoal.train.agreement import CallLog
from tests.scripts import script, shoal

SYNCHRONOUS = Rule(2)
STALE_2 = Rule(2, staleness=2)
ASYNCHRONOUS = Rule(2, asynchronous=True)


def play(folder: Path, rule: Rule, words: str) -> None:
    """`0:7 1:8 1( 0s`: rank 0 does its 7th step, rank 1 its 8th and begins another, rank 0 saves.

    s, e and . are job.save, job.evaluate and the end; x: the rank has exited.
    """
    run_dir = RunDir(folder)
    logs = [CallLog(run_dir, 1, rank, 2) for rank in range(2)]
    steps = [0, 0]
    for log in logs:
        log.lead = rule.lead
    for word in words.split():
        rank, what = int(word[0]), word[1:]
        log = logs[rank]
        if what.startswith(":"):
            steps[rank] = int(what[1:])
            step: Any = SimpleNamespace(steps=steps[rank] - 1, attempt=lambda batch: batch)
            assert log.train(step, "batch") == "batch"
        elif what == "(":
            log._begun.note(steps[rank] + 1)
        elif what == "x":
            run_dir.note_exit(rank, 1)
        else:
            log.note({"s": "job.save", "e": "job.evaluate", ".": None}[what], steps[rank])
    for log in logs:
        log.close()


@pytest.mark.parametrize(
    ("rule", "words", "refusal"),
    [
        # all ranks make the same calls, in any order of arrival
        (ASYNCHRONOUS, "0:1 1:1 0s 1s 1:2 0:2 1e 0e 0. 1.", None),
        (SYNCHRONOUS, "0:1 1:1 0s 1s 1:2 0:2 1e 0e 0. 1.", None),
        # the n-th call differs: the second to come says so
        (ASYNCHRONOUS, "0:1 0s 1:1 1:2 1:3 1.", "rank 1 called nothing more, at the end"),
        (ASYNCHRONOUS, "0:1 1:1 1. 0s", "rank 0 called job.save while rank 1 called nothing"),
        (ASYNCHRONOUS, "0s 1e", "rank 1 called job.evaluate while rank 0 called job.save"),
        (ASYNCHRONOUS, "0e 1e 0s 0:1 1e", "rank 1 called job.evaluate while rank 0 called job.s"),
        # rank 1 begins a step that needs what rank 0 pushes behind its save
        (SYNCHRONOUS, "0:1 1:1 0s 1:2", "rank 1 called step 2 while rank 0 called job.save"),
        (STALE_2, "0:1 1:1 0s 1:2 1:3 1:4", None),  # it may yet come
        (STALE_2, "0:1 1:1 0s 1:2 1:3 1:4 1s 0:2 1:5", None),
        (STALE_2, "0:1 1:1 0s 1:2 1:3 1:4 1:5", "rank 1 called step 5 while rank 0"),
        (ASYNCHRONOUS, "0:1 1:1 0s 1:2 1:3 1:4 1:5 1s", None),
        # rank 1 is inside that step when rank 0 comes
        (SYNCHRONOUS, "0:1 1:1 1( 0s", "rank 0 called job.save while rank 1 called step 2"),
        (STALE_2, "0:1 1:1 1:2 1:3 1( 0s", None),
        (STALE_2, "0:1 1:1 1:2 1:3 1:4 1( 0s", "rank 0 called job.save while rank 1 called st"),
        (STALE_2, "0:1 1:1 1:2 1:3 1:4 0s", None),  # between two steps it may yet save
        (STALE_2, "0:1 1:1 1:2 1:3 1:4 1( 1x 0s", None),  # what is lost is not waited for
        (SYNCHRONOUS, "0:1 1:1 1( 0.", None),  # nor is any other at the end
        (SYNCHRONOUS, "0:1 1:1 0. 1:2", None),
        # a checkpoint of an earlier step was loaded
        (SYNCHRONOUS, "0:8 1:8 0e 1e 0:1 0s", None),
    ],
)
def test_a_call_of_some_ranks_is_named(
    tmp_path: Path, rule: Rule, words: str, refusal: str | None
) -> None:
    if refusal is None:
        play(tmp_path, rule, words)
        return
    with pytest.raises(Desync, match=refusal):
        play(tmp_path, rule, words)


SAVES_ALONE = script("""
def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=3):
        step(batch)
        if job.rank == 0 and job.steps >= 7: job.save("c")
""")


@pytest.mark.whole
@pytest.mark.parametrize(
    "strategy", ["ps", "ps(staleness=2)", 'ps(mode="async")', 'gossip(mode="async")', "hogwild"]
)
def test_a_save_on_rank_0_only_ends_with_a_sentence(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "train.py").write_text(SAVES_ALONE)
    done = shoal("run", "-n", "2", "-s", strategy, "train.py", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "called job.save" in done.stderr
    assert "also job.save, where rank 0 writes" in done.stderr
    assert "Traceback" not in done.stderr
