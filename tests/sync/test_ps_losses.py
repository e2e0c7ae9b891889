"""Workers of a parameter server that die: before they have joined, in the middle, as rank 0."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.members.elastic_sum import ElasticSum
from shoal.errors import PeerLost, ShoalError
from shoal.server.consistency import Rule
from shoal.server.messages import ReplicaSplit
from shoal.strategy.strategy import parse
from shoal.sync.ps.worker import PsWorker
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from tests import forked
from tests.conftest import World
from tests.models import mlp, samples
from tests.server.helpers import MODEL, client_of, launched, servers
from tests.splitting import job_of

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys

END, VICTIM = os.environ["END"].split(), int(os.environ["VICTIM"])

def end(where):
    if END[0] == where and int(os.environ["SHOAL_RANK"]) == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL) if END[1] == "kill" else sys.exit(0)

end("import")
import torch, shoal
from functools import partial
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(40, 4, generator=generator), torch.arange(40) % 3)

def mean(outputs, targets):  # 0.975 of all samples; 1 and 0.95 of what two replicas have
    end("metric")
    return targets.double().mean()

def train(job):
    end("train")
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    step = job.step(net, torch.nn.functional.cross_entropy,
                    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    for batch in job.batches(DATA, batch_size=8, epochs=2):
        step(batch)
        if job.steps == 4: end("middle")
    job.print("evaluated", abs(job.evaluate(mean, DATA) - 0.975) < 1e-9)
    job.save("saved")
    job.print("saved by", job.rank)

shoal.run(train)
"""


def run(
    folder: Path, strategy: str, end: str, victim: int, *options: str, workers: int = 2
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = ["-m", "shoal.cli", "run", "train.py", "-n", str(workers), "-s", strategy]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "END": end, "VICTIM": str(victim)}
    return forked.run(
        [sys.executable, *command, *options],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_the_others_begin_without_a_worker_that_was_killed_before_it_joined(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, "ps(quorum=0.5)", "import kill", 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1] evaluated True", "[1] saved by 1"]
    assert "worker 0 was killed by SIGKILL" in done.stderr
    assert "[1] shoal: worker 1: 10 pushes counted" in done.stderr
    assert done.stderr.endswith("shoal: finished by worker 1, without worker 0\n")
    assert (tmp_path / "saved").is_dir()


def test_kill_at_0_is_before_the_worker_has_joined(tmp_path: Path) -> None:
    done = run(tmp_path, 'ps(staleness=2, placement="rank0")', "never -", 1, "--kill", "1@0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0] evaluated True", "[0] saved by 0"]
    assert "shoal: finished by worker 0, without worker 1" in done.stderr


@pytest.mark.parametrize("where", ["import", "train"])
def test_a_synchronous_run_ends_when_a_worker_ends_before_it_has_joined(
    tmp_path: Path, where: str
) -> None:
    done = run(tmp_path, "ps", f"{where} exit", 1)
    assert done.returncode == 1
    assert "rank 0 lost rank 1" in done.stderr or "worker 1 had finished" in done.stderr


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        ('ps(placement="workers", update="worker")', 1),
        ('ps(mode="async", placement="rank0")', 0),
        ('ps(mode="async", placement="rank0") + pp(2)', 1),  # of the replica that hosts the server
    ],
)
def test_one_error_names_a_worker_that_died_with_a_server(
    tmp_path: Path, strategy: str, victim: int
) -> None:
    done = run(tmp_path, strategy, "middle kill", victim, workers=4 if "pp" in strategy else 2)
    assert done.returncode == 1
    assert f"shoal: worker {victim} was killed by SIGKILL\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("strategy", "end", "victim", "left"),
    [
        ('ps(mode="async") + pp(2)', "middle kill", 3, "0 and 1"),
        ("ps(quorum=0.5, servers=2) + tp(2)", "middle kill", 0, "2 and 3"),
        pytest.param(
            "ps(staleness=2) + pp(2)", "metric kill", 3, "0 and 1", marks=pytest.mark.whole
        ),
        ("ps(staleness=2) + tp(2)", "metric kill", 2, "0 and 1"),
        ('ps(mode="async", placement="rank0") + pp(2)', "middle kill", 2, "0 and 1"),
    ],
)
def test_a_lost_worker_takes_its_replica_with_it_and_the_others_go_on(
    tmp_path: Path, strategy: str, end: str, victim: int, left: str
) -> None:
    """The samples that the lost ones should have tested are tested by the others."""
    done = run(tmp_path, strategy, end, victim, workers=4)
    assert done.returncode == 0, done.stderr
    first = left[0]
    lost = "2 and 3" if left == "0 and 1" else "0 and 1"
    said = [f"[{first}] evaluated True", f"[{first}] saved by {first}"]
    assert done.stdout.splitlines() == said
    assert f"worker {victim} was killed by SIGKILL" in done.stderr
    assert f"worker {victim ^ 1} gave up, having lost its peers" in done.stderr
    for replica in range(2):
        assert f"[{first}] shoal: replica {replica}: " in done.stderr
    assert done.stderr.endswith(f"shoal: finished by workers {left}, without workers {lost}\n")
    assert (tmp_path / "saved").is_dir()


# ---- as threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["quorum=0.5", 'mode="async"', "staleness=1"])
def test_the_lowest_surviving_worker_saves(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule: str
) -> None:
    models = [mlp() for _ in range(3)]
    saved = tmp_path / "saved"
    adam = partial(torch.optim.Adam, lr=0.01)
    lost: set[int] = set()  # what a launcher notes

    def body(group: Group) -> int:
        services = RunServices(
            elastic_sum=ElasticSum(tmp_path / "sums", group.rank, lost.__contains__)
        )
        strategy = parse(f"ps({rule}, servers=2)")
        job = Job(strategy, group, device=torch.device("cpu"), seed=3, services=services)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=adam)
        assert isinstance(step.sync, PsWorker)
        for batch in job.batches(samples(60), 12, epochs=2):
            step(batch)
            if group.rank == 0 and job.steps == 3:
                step.sync.client.close()  # as when it is killed
                lost.add(0)
                return -1
        job.save(saved)
        job.close()
        return step.sync.lowest_survivor

    with launched(monkeypatch, 2):
        assert world(3, body) == [-1, 1, 1]
    alone = Job(parse("single"), solo_group(), device=torch.device("cpu"), seed=3)
    step = alone.step(mlp(), F.cross_entropy, optimizer=adam)
    alone.load(saved)
    assert torch.equal(models[1][0].weight, step.model[0].weight)  # type: ignore[index]
    assert len(step.update.optimizer.state) == 6, "Adam's state of every parameter"


def test_of_a_split_replica_the_rank_is_asked_for_and_named() -> None:
    """Worker 1 of the second of two parts is rank 3."""
    asked: list[int] = []
    with servers() as found:
        found[0].host.has_exited = lambda rank: bool(asked.append(rank))
        first, second = (client_of(found, w, Rule(2), split=ReplicaSplit(1, 2)) for w in range(2))
        membership = found[0].models[MODEL].membership
        assert membership.has_exited is not None and not membership.has_exited(1)
        assert asked[-1] == 3
        second.close()
        with pytest.raises(PeerLost, match="rank 1 lost rank 3"):
            first.barrier()
        first.close()


@pytest.mark.parametrize("rule", [Rule(2), Rule(2, asynchronous=True), Rule(2, quorum=1)])
def test_a_worker_that_exited_before_it_joined_is_not_waited_for(rule: Rule) -> None:
    exited: set[int] = set()
    with servers(2) as found:
        for server in found:
            server.host.has_exited = exited.__contains__
        client = client_of(found, 0, rule)
        exited.add(1)
        if rule.is_synchronous:
            with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
                client.barrier()
        else:
            client.barrier()
            client.leave()
        client.close()
        if not rule.is_synchronous:
            assert all(server.wait_idle(60) for server in found)


class _Mine(Exception):
    pass


@pytest.mark.parametrize("strategy", ['ps(placement="rank0")', 'ps(placement="rank0", quorum=1)'])
@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_a_worker_is_what_is_seen(world: World, strategy: str, failing: int) -> None:
    def train(group: Group) -> None:
        with job_of(group, strategy, mlp()) as (job, step):
            for number, batch in enumerate(job.batches(samples(32), 8)):
                if number == 1 and group.rank == failing:
                    raise _Mine
                step(batch)

    with pytest.raises(_Mine):
        world(2, train)


@pytest.mark.parametrize("early", [0, 1])
def test_a_worker_that_takes_fewer_steps_is_named(world: World, early: int) -> None:
    def train(group: Group) -> Any:
        with job_of(group, 'ps(placement="rank0")', mlp()) as (job, step):
            for number, batch in enumerate(job.batches(samples(32), 8)):
                if number == 2 and group.rank == early:
                    break
                step(batch)

    with pytest.raises(ShoalError, match=f"worker {early} has ended its training after 2 steps"):
        world(2, train)
