"""The options of `job.step`, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.replica.batchnorm import has_batchnorm
from shoal.replica.loss import LossFunction
from shoal.replica.microbatch_context import Precision
from shoal.schedules.addition_tree import runs_of
from shoal.strategy.split_terms import Pp
from shoal.strategy.strategy import Strategy
from shoal.sync.optimizer_step import LearningRate, OptimizerFactory, SchedulerFactory
from shoal.train.data.sampling import BatchSplit

_HINTS = {
    "loss": "it takes (outputs, targets)",
    "lr": "it takes the number of the step and returns the learning rate of that step",
    "scheduler": "it takes the optimizer and returns a scheduler of torch.optim.lr_scheduler",
    "count": "it takes a batch and returns what the loss is a mean over",
}
Count = Callable[[Any], int | float | Tensor]
OnNan = Literal["stop", "skip", "go on"]


@dataclass(frozen=True)
class StepFunctions:
    """The functions that a script passes to `job.step`."""

    loss: LossFunction | None
    optimizer: OptimizerFactory
    lr: LearningRate | None = None
    count: Count | None = None
    scheduler: SchedulerFactory | None = None

    def check(self) -> None:
        for name, hint in _HINTS.items():
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise BadInput(f"{name} has to be a function, not {value!r}; {hint}")
        if isinstance(self.loss, type) and issubclass(self.loss, nn.Module):
            name = self.loss.__name__
            raise BadInput(f"the loss is the class {name}: give job.step an object, {name}()")


@dataclass(frozen=True)
class StepOptions:
    """How to compute a step; see `Job.step`."""

    clip_norm: float | None = None
    accumulate: int = 1
    precision: Precision = "fp32"
    exact: bool = False
    microbatches: int = 8
    batchnorm: Literal["global", "local"] = "global"
    on_nan: OnNan = "go on"
    compile: bool | str = False
    may_take_whole_batches: bool = False  # a pipeline, whose micro-batches were not chosen

    @property
    def stops_at_nan(self) -> bool:
        """With fp16 the scaler skips steps whose loss or gradients are too large."""
        return self.on_nan == "stop" and self.precision != "fp16"

    def resolve(self, strategy: Strategy, replicas: int, model: nn.Module) -> StepOptions:
        """Check the options under `strategy`, and add the micro-batches of its pipeline."""
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadInput(f"clip_norm has to be above 0, not {self.clip_norm}")
        if self.accumulate < 1 or self.microbatches < 1:
            raise BadInput("accumulate and microbatches count micro-batches: at least 1")
        if self.batchnorm not in ("global", "local"):
            raise BadInput(f'batchnorm is "global" or "local", not {self.batchnorm!r}')
        if self.on_nan not in get_args(OnNan):
            raise BadInput(f'on_nan is "stop", "skip" or "go on", not {self.on_nan!r}')
        if self.exact and self.accumulate > 1:
            raise BadInput("exact=True accumulates by itself: set microbatches, not accumulate")
        if self.exact and replicas > self.microbatches:
            raise BadInput(
                f"exact=True gives every replica a micro-batch at least, and {replicas} replicas "
                f"are more than microbatches={self.microbatches}"
            )
        if self.exact and self.microbatches % replicas and not strategy.is_exact_at_any_number:
            raise BadInput(
                f"exact=True gives every replica the same number of micro-batches, and "
                f"{replicas} replicas do not divide {self.microbatches}: choose another "
                "microbatches or number of workers"
            )
        for term in (strategy.tp, strategy.ep, strategy.cp):
            if self.exact and term is not None and term.size > 1:
                raise BadInput(
                    f"exact=True adds in the order of one worker, and {term} adds partial sums of "
                    "several workers: omit one of them"
                )
        return self.with_pipeline(strategy.pp, model)

    def with_pipeline(self, pp: Pp | None, model: nn.Module | None = None) -> StepOptions:
        """These options with the micro-batches of a pipeline.

        They are those of `pp`, or else `accumulate`, or else two per stage. It is one micro-batch
        where stages do not overlap, and where BatchNorm needs the global batch: with more, the
        result would not be that of one worker.
        """
        if pp is None or pp.size == 1:
            return self
        if self.exact and pp.microbatches is not None:
            raise BadInput(
                f"{pp}: with exact=True the micro-batches are those of job.step "
                f"(microbatches={self.microbatches}); omit them in pp"
            )
        if self.exact:
            return self
        needs_global_batch = (
            self.batchnorm == "global" and model is not None and has_batchnorm(model)
        )
        is_one = pp.schedule == "inter-op" or needs_global_batch
        default = 1 if is_one else 2 * pp.size
        chosen = self.accumulate if self.accumulate > 1 else default
        is_free = pp.microbatches is None and self.accumulate == 1
        count = pp.microbatches or chosen
        return replace(self, accumulate=count, may_take_whole_batches=is_free)

    def local_microbatches(self, replicas: int, replica: int = 0) -> int:
        """Micro-batches that a replica computes."""
        if not self.exact:
            return self.accumulate
        start, stop = runs_of(self.microbatches, replicas)[replica]
        return stop - start

    def split(self, replica: int, replicas: int) -> BatchSplit:
        """How a global batch is split over replicas under these options."""
        microbatches = self.microbatches if self.exact else self.accumulate
        return BatchSplit(replica, replicas, microbatches, self.exact)
