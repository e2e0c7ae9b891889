"""Times of forward, backward and update of a user's model, measured on its first batch.

`-s auto` starts the script on one worker or several, which all compute at the same time, each its
rows of the batch. Gradients are collected as under ddp, and summed between backward and update: so
that workers meet in every step, and caches are as in a run. How long the slowest one keeps the
others waiting is measured, too.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.data.rows import move_to, num_rows
from shoal.errors import StopTraining
from shoal.observe.memory_estimate import EstimateJob, first_step
from shoal.replica.flat.params import FlatParams
from shoal.replica.microbatch import Loss, autocast_for, call_model
from shoal.runtime.config import PROFILE, WorkloadTraceConfig
from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES, LARGE_BYTES
from shoal.strategy.strategy import as_strategy
from shoal.sync.ddp import ddp_buckets
from shoal.sync.optimizer_step import OptimizerFactory, make_optimizer
from shoal.train.job import Job
from shoal.train.step.cut_batch import ForwardSignature
from shoal.train.step.options import StepOptions

_FEWEST = 8
_MOST = 2000
_WARM_UP = 3
_KEPT = (0.02, 0.98)  # of all rounds, the mean of what lies between


class PassTimes(NamedTuple):
    """Seconds of one step of one worker."""

    forward_s: float
    backward_s: float
    update_s: float


class ProfileJob(EstimateJob):
    """A job that measures the first step that it is given."""

    seconds = 0.0
    _document: dict[str, Any] | None = None

    def around_script(self) -> AbstractContextManager[None]:
        return nullcontext()  # it computes

    def setup(self, *objects: Any) -> Any:
        raise StopTraining

    def _estimate(
        self, model: nn.Module, loss: Loss, optimizer: Any, batch: Any, options: StepOptions
    ) -> None:
        content = move_to(getattr(batch, "content", batch), self.device)
        model.to(self.device).train()
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        passes = _Passes(model, loss, optimizer, named, options, self.group)
        rounds = passes.measure(content, self.seconds)
        everywhere = _of_all_ranks(self.group, rounds, self.device)
        sums = _of_all_ranks(self.group, passes.sums[-len(rounds) :], self.device)
        self._document = {
            "rows": num_rows(content),
            **_summary(everywhere.flatten(0, 1).tolist()),
            **passes.unbroken(content),
            "slowest": _slowest(everywhere),
            "gradients_s": _together_s(sums),
        }

    def write(self, folder: Path) -> None:
        if self.rank == 0 and self._document is not None:
            (folder / PROFILE).write_text(json.dumps({"workers": self.size, **self._document}))


class _Passes:
    """Steps of a model without Shoal: forward, backward, sum over workers, update."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: OptimizerFactory,
        named: list[tuple[str, nn.Parameter]],
        options: StepOptions,
        group: Group,
    ):
        self._model = model
        self._loss = loss
        self._flat = FlatParams(named)
        self._optimizer = make_optimizer(optimizer, named)
        self._device = self._flat.device
        self._autocast = autocast_for(self._device, options.precision)
        self._group = group
        self._full: list[slice] = []
        if group.size > 1:
            self._flat.grads.watch(ddp_buckets(self._flat, DEFAULT_BUCKET_BYTES), LARGE_BYTES)
        self.sums: list[tuple[float, float]] = []

    def measure(self, content: Any, seconds: float) -> list[PassTimes]:
        for _ in range(_WARM_UP):
            self._step(content)
        start_s = time.perf_counter()
        self._step(content)
        steps = torch.tensor([seconds / (time.perf_counter() - start_s)], device=self._device)
        self._group.broadcast(steps).wait()
        number = round(min(_MOST, max(_FEWEST, float(steps))))
        return [self._step(content) for _ in range(number)]

    def unbroken(self, content: Any) -> dict[str, float]:
        """On a device that runs behind its host: seconds of a step if the host does not wait.

        `host_s` is what the host needs to launch it.
        """
        if self._device.type != "cuda":
            return {}
        hosts_s = []
        start_s = self._now()
        for _ in range(_FEWEST):
            self._launch(content)
        whole_s = (self._now() - start_s) / _FEWEST
        for _ in range(_FEWEST):
            start_s = self._now()
            self._launch(content)
            hosts_s.append(time.perf_counter() - start_s)
        return {"whole_s": whole_s, "host_s": statistics.median(hosts_s)}

    def _step(self, content: Any) -> PassTimes:
        marks = [self._now()]
        loss = self._forward(content)
        marks.append(self._now())
        self._backward(loss)
        marks.append(self._now())
        self._sum_gradients()
        begin_s = self._now()
        self.sums.append((marks[-1], begin_s))
        self._update()
        forward_s, backward_s = (after - before for before, after in pairwise(marks))
        return PassTimes(forward_s, backward_s, self._now() - begin_s)

    def _launch(self, content: Any) -> None:
        """A step without a look at the clock."""
        self._backward(self._forward(content))
        self._update()

    def _forward(self, content: Any) -> Tensor:
        with self._autocast():
            rows = num_rows(content)
            inputs, targets = ForwardSignature(self._model).arguments(content, rows)
            return self._loss(call_model(self._model, inputs), targets)

    def _backward(self, loss: Tensor) -> None:
        """Copies to buckets belong to it; the sums, which ddp begins meanwhile, come later."""
        self._full.clear()
        self._flat.grads.arm(self._full.append)
        loss.backward()  # type: ignore[no-untyped-call]
        self._flat.grads.flush()

    def _sum_gradients(self) -> None:
        grads = self._flat.grads
        sums = [
            self._group.all_reduce(one) for full in self._full for one in grads.tensors[full.start]
        ]
        for under_way in sums:
            under_way.wait()

    def _update(self) -> None:
        if self._full:
            self._flat.grads.publish()
        self._optimizer.step()
        self._flat.zero_grad()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _of_all_ranks(
    group: Group, rounds: Sequence[tuple[float, ...]], device: torch.device
) -> Tensor:
    """Seconds by rank, step and pass."""
    mine = torch.tensor(rounds, dtype=torch.float64, device=device)
    everywhere = mine.new_empty(group.size, *mine.shape)
    group.all_gather(everywhere, mine).wait()
    return everywhere.cpu()


def _slowest(everywhere: Tensor) -> float:
    """What the slowest rank of a step needs from one sum to the next, over what all need.

    The update comes after the sum, so that it counts for the next step.
    """
    between = everywhere[:, 1:, :2].sum(dim=2) + everywhere[:, :-1, 2]
    slowest = between.amax(dim=0)
    share = (slowest / between.mean(dim=0)).sort().values
    first, last = (round(part * len(share)) for part in _KEPT)
    return float(share[first:last].mean())


def _together_s(sums: Tensor) -> float:
    """A call from its last rank's begin to its last rank's end; ranks of a host have one clock."""
    begin, end = sums.amax(dim=0).unbind(dim=1)
    return float((end - begin).median())


def _summary(rounds: list[list[float]]) -> dict[str, Any]:
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
    alone = as_strategy("single")
    first_step(ProfileJob, train, make, alone, seconds=config.profile_s).write(config.folder)
    return True
