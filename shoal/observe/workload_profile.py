"""Times of forward, backward and update of a user's model, measured on its first batch.

`shoal predict --profile` and `shoal bench predict` start the script on one worker or several, which
all compute at the same time, each its rows of the batch, and communicate nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.data.rows import move_to, num_rows
from shoal.observe.capture import StopTraining
from shoal.observe.memory_estimate import EstimateJob
from shoal.replica.microbatch import Loss, autocast_for, call_model
from shoal.runtime.config import PROFILE, WorkloadTraceConfig
from shoal.strategy.strategy import as_strategy
from shoal.sync.optimizer_step import make_optimizer
from shoal.train.arguments import ForwardSignature
from shoal.train.job import Job
from shoal.train.options import StepOptions

_FEWEST = 8
_WARM_UP = 3
_KEPT = (0.1, 0.9)  # of all rounds, the mean of what lies between


class PassTimes(NamedTuple):
    """Seconds of one step of one worker."""

    forward_s: float
    backward_s: float
    update_s: float


class ProfileJob(EstimateJob):
    """A job that measures the first step that it is given."""

    seconds = 0.0
    _document: dict[str, Any] | None = None

    def setup(self, *objects: Any) -> Any:
        raise StopTraining

    def _estimate(
        self, model: nn.Module, loss: Loss, optimizer: Any, batch: Any, options: StepOptions
    ) -> None:
        content = move_to(getattr(batch, "content", batch), self.device)
        model.to(self.device).train()
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        passes = _Passes(model, loss, make_optimizer(optimizer, named), options, self.device)
        rounds = passes.measure(content, self.seconds, lambda: self.group.barrier().wait())
        self._document = {"rows": num_rows(content), **_summary(rounds)}

    def write(self, folder: Path) -> None:
        if self.rank == 0 and self._document is not None:
            (folder / PROFILE).write_text(json.dumps({"workers": self.size, **self._document}))


class _Passes:
    """Steps of a model without Shoal: forward, backward, update."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        options: StepOptions,
        device: torch.device,
    ):
        self._model = model
        self._loss = loss
        self._optimizer = optimizer
        self._autocast = autocast_for(device, options.precision)
        self._device = device
        self._gradients = _lay_out_gradients(model)

    def measure(self, content: Any, seconds: float, begin: Callable[[], Any]) -> list[PassTimes]:
        for _ in range(_WARM_UP):
            self._step(content)
        begin()
        ends_s = time.perf_counter() + seconds
        rounds: list[PassTimes] = []
        while len(rounds) < _FEWEST or time.perf_counter() < ends_s:
            rounds.append(self._step(content))
        return rounds

    def _step(self, content: Any) -> PassTimes:
        marks = [self._now()]
        with self._autocast():
            rows = num_rows(content)
            inputs, targets = ForwardSignature(self._model).arguments(content, rows)
            loss = self._loss(call_model(self._model, inputs), targets)
        marks.append(self._now())
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(self._now())
        self._optimizer.step()
        self._gradients.zero_()
        marks.append(self._now())
        return PassTimes(*(after - before for before, after in pairwise(marks)))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _lay_out_gradients(model: nn.Module) -> torch.Tensor:
    """One buffer that backward adds to, as steps of Shoal have it."""
    params = [p for p in model.parameters() if p.requires_grad]
    kind = params[0]
    flat = torch.zeros(sum(p.numel() for p in params), dtype=kind.dtype, device=kind.device)
    pieces = torch.split(flat, [p.numel() for p in params])
    for param, piece in zip(params, pieces, strict=True):
        param.grad = piece.view_as(param)
    return flat


def _summary(rounds: list[PassTimes]) -> dict[str, Any]:
    columns = [sorted(column) for column in zip(*rounds, strict=True)]
    first, last = (round(share * len(rounds)) for share in _KEPT)
    means = {
        name: statistics.fmean(column[first:last])
        for name, column in zip(PassTimes._fields, columns, strict=True)
    }
    quartiles = {
        name: statistics.quantiles(column, n=4, method="inclusive")[::2]
        for name, column in zip(PassTimes._fields, columns, strict=True)
    }
    return {**means, "quartiles": quartiles}


def profile_workload(
    config: WorkloadTraceConfig, train: Callable[[Job], Any], make: Callable[[type[Job]], Job]
) -> bool:
    """Whether this run only measures the first step; it is then done."""
    if config.folder is None or not config.profile_s:
        return False
    job = make(ProfileJob)
    assert isinstance(job, ProfileJob)
    job.prepare(as_strategy("single"), 1)
    job.seconds = config.profile_s
    with suppress(StopTraining):
        train(job)
    job.write(config.folder)
    return True
