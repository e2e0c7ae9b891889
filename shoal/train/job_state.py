"""What a job trains and how far it has come: the content of a checkpoint."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.sync import Comeback
from shoal.train.checkpoints import files
from shoal.train.data.loop_place import lines_of_caller
from shoal.train.data.position import Positions
from shoal.train.data.stream import BatchStream
from shoal.train.step.run_services import StepContext
from shoal.train.step.step import Step
from shoal.train.throughput import Throughput

if TYPE_CHECKING:
    from shoal.train.checkpoints.averages import Ema


@dataclass
class JobState:
    """`models` and `emas` grow with `job.step`, `job.setup` and `job.ema`.

    `steps` counts training steps, including those of the run that a checkpoint continues.
    """

    context: StepContext
    rank: int
    workers: int
    stream: BatchStream
    throughput: Throughput
    models: list[Step] = field(default_factory=list)
    emas: list[Ema] = field(default_factory=list)
    steps: int = 0

    @property
    def lowest_replica(self) -> int:
        """The lowest surviving one."""
        return self.models[-1].sync.lowest_survivor if self.models else 0

    def count(self, steps: int) -> None:
        """So many steps are done. The launcher reads it: others go on there if this one is lost."""
        self.steps = steps
        if self.context.services.step_count is not None:
            self.context.services.step_count.note(steps)

    def go_on_after(self, steps: int, batches: int, positions: Positions | None) -> None:
        """The next step is the one after these, on the batch after these."""
        self.count(steps)
        self.stream.restore(batches, positions)
        self.throughput.restart()

    def note_return(self, returned: Comeback) -> None:
        """For the launcher: this process has taken the place of one that was lost."""
        config = self.context.services.config
        launcher_reads = config.run_dir or config.host_dir
        if launcher_reads is not None:
            launcher_reads.note_return(self.rank, config.incarnation, returned._asdict())

    def description(self, about: dict[str, Any]) -> dict[str, Any]:
        """The document of a checkpoint, without what belongs to one model."""
        return {
            "steps": self.steps,
            "batches": self.stream.delivered,
            "position": self.stream.positions.document(lines_of_caller(self.stream.trains_in)),
            "seed": self.context.seed,
            "strategy": str(self.context.strategy),
            "workers": self.workers,
            "about": about,
        }

    def fit_averages(self, saved: files.Checkpoint, where: Path) -> list[dict[str, Tensor]]:
        from shoal.train.checkpoints.state import fit_others

        emas = [(ema.model, ema.steps[0].shard) for ema in self.emas]
        return fit_others(emas, "ema", saved, where)

    # ------------------------------------------------------------------ elastic runs

    def pack(self) -> dict[str, Any]:
        """All of the state, which one worker of an elastic run sends to others."""
        from shoal.train.checkpoints.state import snapshot

        with ExitStack() as stack:
            for step in self.models:
                if not step.sync.undo_steps:  # else a newcomer gets what this replica has
                    stack.enter_context(step.sync.full_weights(optimizer=True))
            averages = [ema.gather(True) for ema in self.emas]
            states = [step.sync.state() if step.sync.undo_steps else {} for step in self.models]
            steps = max((step.steps for step in self.models), default=self.steps)
            saved = snapshot(self.models, states, {"steps": steps}, {"ema": averages})
        document = json.loads(json.dumps(saved.document))
        return {"model": saved.model, "optimizer": saved.optimizer, "document": document}

    def unpack(self, state: dict[str, Any], is_new: bool) -> None:
        """Take that of another worker; `is_new`: this worker has not trained before."""
        from shoal.train.checkpoints.state import fit

        saved = files.Checkpoint(state["model"], state["optimizer"], state["document"])
        source = Path("another worker")
        states = fit(self.models, saved, source)
        averages = self.fit_averages(saved, source)
        for fitting in states:
            fitting.load()
        if not is_new:
            return  # the script is in this step: it updates averages itself
        for ema, tensors in zip(self.emas, averages, strict=True):
            ema.load(tensors)
        self._start_late(saved.document["steps"])

    def pack_unsharded(self) -> dict[str, Any]:
        """What every worker holds alike where the strategy shards the training state.

        Buffers, frozen parameters, averages, and the numbers of steps: a newcomer gets them whole.
        """
        return {
            "steps": self.steps,
            "models": [
                {"steps": step.steps, "tensors": _unsharded_tensors(step)} for step in self.models
            ],
            "averages": [ema.averages for ema in self.emas],
        }

    def unpack_unsharded(self, state: dict[str, Any]) -> None:
        """Take that of another worker, in a worker that has not trained before."""
        for step, of_model in zip(self.models, state["models"], strict=True):
            _copy(_unsharded_tensors(step), of_model["tensors"])
            step.steps = step.update.steps = of_model["steps"]
        for ema, averages in zip(self.emas, state["averages"], strict=True):
            _copy(dict(enumerate(ema.averages)), dict(enumerate(averages)))
        self._start_late(int(state["steps"]))

    def _start_late(self, steps: int) -> None:
        """Go on after these steps of the others."""
        config = self.context.services.config
        if config.incarnation:
            run_dir = config.run_dir  # on another host the launcher knows where it was lost
            lost_at = 0 if run_dir is None else run_dir.steps_done(self.rank) or 0
            self.note_return(Comeback(steps, lost_at))
        self.go_on_after(steps, steps, None)


def _unsharded_tensors(step: Step) -> dict[str, Tensor]:
    trained = {id(p) for p in step.flat.params}
    frozen = {name: p.detach() for name, p in step.model.named_parameters() if id(p) not in trained}
    return {**frozen, **dict(step.model.named_buffers())}


def _copy(targets: dict[Any, Tensor], values: dict[Any, Tensor]) -> None:
    with torch.no_grad():
        for name, target in targets.items():
            value = values.get(name)
            if value is None or value.shape != target.shape or value.dtype != target.dtype:
                raise ShoalError(f"another worker trains another model: {name} is not the same")
            target.copy_(value)
