"""What a verification run leaves behind."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import shoal
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import StopTraining
from shoal.examples import clicks
from shoal.observe.capture import Capture
from shoal.observe.captured_run import CapturedRun
from shoal.observe.verify import compare
from shoal.runtime.config import CaptureConfig
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World

ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)


def captured(group: Group, strategy: str, folder: Path, model: torch.nn.Module) -> None:
    """Three steps of the clicks example's model."""
    folder.mkdir(exist_ok=True)
    job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)
    capture = Capture(job, CaptureConfig(folder, steps=3))
    step = job.step(model, F.binary_cross_entropy_with_logits, optimizer=ADAGRAD)
    data, _ = clicks.load_clicks(400, 4000)
    with suppress(StopTraining):
        for batch in job.batches(data, 32):
            step(batch)
    capture.write()
    job.close()


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return clicks.ClicksNet(4000, 4)


@pytest.mark.parametrize("placement", ["rank0", "workers"])
def test_rows_of_an_embedding_are_compared(world: World, tmp_path: Path, placement: str) -> None:
    models = [net(), net()]
    captured(solo_group(), "single", tmp_path / "alone", net())
    strategy = f'ps(placement="{placement}")'
    world(2, lambda g: captured(g, strategy, tmp_path / "together", models[g.rank]))
    alone, together = (CapturedRun.read(tmp_path / name) for name in ("alone", "together"))
    data, _ = clicks.load_clicks(400, 4000)
    job = Job(parse("single"), solo_group(), device=torch.device("cpu"), seed=3)
    batches = itertools.islice(job.batches(data, 32), 3)
    looked_up = [batch[0][:, : clicks.FIELDS] for batch in batches]
    assert torch.equal(alone.tensors["rows/ids"], torch.cat(looked_up).unique().long())
    assert alone.tensors["rows/rows"].shape == (len(alone.tensors["rows/ids"]), 4)
    assert compare(alone, together, None).ok

    together.tensors["rows/rows"][5] += 0.01
    verdict = compare(alone, together, None)
    assert verdict.first_tensor is not None and verdict.first_tensor.what == "rows/rows"
    assert isinstance(models[0].rows, shoal.Embedding)
