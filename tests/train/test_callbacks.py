"""What a run tells callbacks, a file of lines, and MLflow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.comm.group import Group
from shoal.strategy.strategy import parse
from shoal.train.callbacks import Callback, Callbacks, JsonLines
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from tests import scripts
from tests.conftest import World
from tests.models import samples

CPU = torch.device("cpu")


class Told(Callback):
    def __init__(self, every: int = 1):
        self.every = every
        self.events: list[tuple[Any, ...]] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append(("step", step, *metrics))

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append(("log", step, metrics))

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append(("evaluate", step, *metrics))

    def on_checkpoint(self, step: int, path: str) -> None:
        self.events.append(("checkpoint", step, Path(path).name))

    def on_loss_of_worker(self, step: int, rank: int) -> None:
        self.events.append(("loss", step, rank))

    def on_end(self, report: dict[str, Any]) -> None:
        self.events.append(("end", report["steps"]))


def train(world: World, folder: Path, given: list[list[Callback]], strategy: str = "ddp") -> None:
    def body(group: Group) -> None:
        services = RunServices(callbacks=given[group.rank])
        job = Job(parse(strategy), group, device=CPU, services=services)
        model = nn.Linear(6, 3)
        with torch.no_grad():
            model.weight.fill_(0.1)
        step = job.step(model, F.cross_entropy, optimizer=sgd)
        for batch in job.batches(samples(16), 4):
            step(batch)
            job.log(lr=0.5)
        job.evaluate(F.cross_entropy, samples(16))
        job.save(folder / "saved")
        job.close()

    world(2, body)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


@pytest.mark.parametrize("strategy", ["ddp", "zero(1)", "localsgd(every=2)"])
def test_the_first_worker_alone_is_told_in_the_order_of_events(
    world: World, tmp_path: Path, strategy: str
) -> None:
    told = [Told(), Told(every=3)]
    train(world, tmp_path, [[told[0]], [told[1]]], strategy)
    steps = [
        event
        for step in range(1, 5)
        for event in (("step", step, "loss"), ("log", step, {"lr": 0.5}))
    ]
    behind = [("evaluate", 4, "value"), ("checkpoint", 4, "saved"), ("end", 4)]
    assert told[0].events == [*steps, *behind]
    assert told[1].events == []


def test_steps_between_two_calls_and_lost_workers() -> None:
    told = Told(every=3)
    lost: list[int] = []
    callbacks = Callbacks([told], lambda: True, lambda: lost)
    for step in range(1, 8):
        callbacks.step(step, torch.tensor(0.0))
    lost += [2, 1]
    callbacks.end({"steps": 7})
    callbacks.end({"steps": 7})
    ends = [("loss", 7, 1), ("loss", 7, 2), ("end", 7), ("end", 7)]
    assert told.events == [("step", 3, "loss"), ("step", 6, "loss"), *ends]


def test_lines_are_json_also_where_a_loss_is_none(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "lines")
    lines.on_step(1, {"loss": float("nan"), "step": 5.0})
    lines.on_checkpoint(2, "there")
    lines.on_end({"steps": 2, "samples_per_s": None})
    found = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "lines").open()]
    assert [{**each, "time": 0} for each in found] == [
        {"event": "step", "step": 1, "time": 0, "metrics": {"loss": "nan", "step": 5.0}},
        {"event": "checkpoint", "step": 2, "time": 0, "path": "there"},
        {"event": "end", "step": 2, "time": 0, "samples_per_s": None},
    ]


MLFLOW = """
import sys, mlflow, shoal, torch
from torch import nn

class ToMlflow(shoal.Callback):
    def on_step(self, step, metrics):
        mlflow.log_metrics(metrics, step)

def train(job):
    data = [(torch.ones(4) * i, i % 2) for i in range(16)]
    step = job.step(nn.Linear(4, 2), nn.functional.cross_entropy,
                    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.01))
    for batch in job.batches(data, 4):
        step(batch)

mlflow.set_tracking_uri(sys.argv[1])
shoal.run(train, callbacks=[ToMlflow()])
"""


@pytest.mark.whole
def test_mlflow_in_five_lines(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")  # mlflow-skinny leaves it out
    (tmp_path / "train.py").write_text(MLFLOW)
    store = f"sqlite:///{tmp_path}/runs.db"
    words = [sys.executable, "-m", "shoal", "run", "-n", "2", "train.py", store]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=240)
    client = mlflow.tracking.MlflowClient(store)
    runs = client.search_runs(["0"])
    history = [client.get_metric_history(run.info.run_id, "loss") for run in runs]
    assert [[point.step for point in points] for points in history if points] == [[1, 2, 3, 4]]


@pytest.mark.whole
def test_tensorboard_reads_the_scalars_of_the_lines(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = scripts.started(
        *("run", "-n", "2", "--tensorboard", "board", "--jsonl", "lines", "digits"),
        *("--epochs", "1"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    board = events.EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0})
    board.Reload()
    found = {
        (tag, one.step): one.value for tag in board.Tags()["scalars"] for one in board.Scalars(tag)
    }
    groups = {"step": "train", "log": "log", "evaluate": "evaluate"}
    lines = [json.loads(line) for line in (tmp_path / "lines").open()]
    assert {one["event"] for one in lines} >= {"step", "evaluate", "end"}
    assert found == {
        (f"{groups[one['event']]}/{name}", one["step"]): torch.tensor(value).item()  # fp32
        for one in lines
        if one["event"] in groups
        for name, value in one["metrics"].items()
    }


def test_the_class_is_public() -> None:
    assert shoal.Callback is Callback
