"""Workers of a parameter server that die: before they have joined, in the middle, as rank 0."""

from __future__ import annotations

import subprocess
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
from shoal.train.checkpoints.files import read
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from tests.conftest import World
from tests.jobs import CPU
from tests.models import mlp, samples
from tests.scripts import shoal
from tests.server.helpers import MODEL, client_of, launched, servers
from tests.splitting import job_of
from tests.splitting import mlp as split_mlp

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
    (folder / "train.py").write_text(SCRIPT)
    words = ["run", "-n", str(workers), "-s", strategy, *options, "train.py"]
    return shoal(*words, cwd=folder, END=end, VICTIM=str(victim))


@pytest.mark.parametrize(
    ("strategy", "victim", "end", "options"),
    [
        ("ps(quorum=0.5)", 0, "import kill", []),
        ('ps(staleness=2, placement="rank0")', 1, "never -", ["--kill", "1@0"]),
    ],
)
def test_the_others_begin_without_a_worker_that_was_killed_before_it_joined(
    tmp_path: Path, strategy: str, victim: int, end: str, options: list[str]
) -> None:
    done = run(tmp_path, strategy, end, victim, *options)
    assert done.returncode == 0, done.stderr
    left = 1 - victim
    assert done.stdout.splitlines() == [f"[{left}] evaluated True", f"[{left}] saved by {left}"]
    assert f"worker {victim} was killed by SIGKILL" in done.stderr
    assert f"[{left}] shoal: worker {left}: 10 pushes counted" in done.stderr
    assert done.stderr.endswith(f"shoal: finished by worker {left}, without worker {victim}\n")
    assert (tmp_path / "saved").is_dir()


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


RULES = ["quorum=0.5", 'mode="async"', "staleness=1", 'mode="async", compress="topk(0.05)"']


@pytest.mark.parametrize("rule", RULES)
def test_the_lowest_surviving_worker_saves(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule: str
) -> None:
    models = [mlp() for _ in range(3)]
    saved = tmp_path / "saved"
    adam = partial(torch.optim.Adam, lr=0.01)
    lost: set[int] = set()  # what a launcher notes

    def body(group: Group) -> int:
        sums = ElasticSum(tmp_path / "sums", group.rank, lost.__contains__)
        strategy = parse(f"ps({rule}, servers=2)")
        job = Job(strategy, group, device=CPU, seed=3, services=RunServices(elastic_sum=sums))
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
    alone = Job(parse("single"), solo_group(), device=CPU, seed=3)
    step = alone.step(mlp(), F.cross_entropy, optimizer=adam)
    alone.load(saved)
    assert torch.equal(models[1][0].weight, step.model[0].weight)  # type: ignore[index]
    assert len(step.update.optimizer.state) == 6, "Adam's state of every parameter"
    left_to_send = {n.rpartition("/")[2] for n in read(saved).optimizer if "residual" in n}
    workers = (1, 2) if "compress" in rule else ()
    assert left_to_send == {f"gradients:worker:{rank}:residual" for rank in workers}


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


class _Mine(Exception):
    pass


@pytest.mark.parametrize(
    ("strategy", "failing"),
    [
        *(('ps(placement="rank0")', rank) for rank in range(2)),
        *(('ps(placement="rank0", quorum=1)', rank) for rank in range(2)),
        ('ps(mode="async", placement="rank0") + pp(2)', 3),
    ],
)
def test_the_error_of_a_worker_is_what_is_seen(world: World, strategy: str, failing: int) -> None:
    """The others do not wait for the worker that fails."""
    size = 4 if "pp" in strategy else 2
    models = [split_mlp() for _ in range(size)]

    def train(group: Group) -> None:
        def loss(outputs: Any, targets: Any) -> Any:
            if group.rank == failing and job.steps == 1:
                raise _Mine
            return F.cross_entropy(outputs, targets)

        with job_of(group, strategy, models[group.rank], loss=loss) as (job, step):
            for batch in job.batches(samples(32), 8):
                step(batch)

    with pytest.raises(_Mine):
        world(size, train)


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
