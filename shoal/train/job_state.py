"""What a job trains and how far it has come: the content of a checkpoint."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.data.position import Positions
from shoal.data.stream import BatchStream
from shoal.observe.throughput import Throughput
from shoal.strategy.strategy import Strategy
from shoal.sync.base import Comeback
from shoal.train import checkpoint
from shoal.train.run_services import RunServices
from shoal.train.step import Step

if TYPE_CHECKING:
    from shoal.train.ema import Ema

Averages = list[tuple[dict[str, Tensor], dict[str, str]]]


@dataclass
class JobState:
    """`models` and `emas` grow with `job.step`, `job.setup` and `job.ema`.

    `steps` counts training steps, including those of the run that a checkpoint continues.
    """

    strategy: Strategy
    seed: int
    rank: int
    workers: int
    stream: BatchStream
    throughput: Throughput
    services: RunServices
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
        if self.services.step_count is not None:
            self.services.step_count.note(steps)

    def go_on_after(self, steps: int, batches: int, positions: Positions | None) -> None:
        """The next step is the one after these, on the batch after these."""
        self.count(steps)
        self.stream.restore(batches, positions)
        self.throughput.restart()

    def note_return(self, returned: Comeback) -> None:
        """For the launcher: this process has taken the place of one that was lost."""
        config = self.services.config
        launcher_reads = config.run_dir or config.host_dir
        if launcher_reads is not None:
            launcher_reads.note_return(self.rank, config.generation, returned._asdict())

    def description(self, about: dict[str, Any]) -> dict[str, Any]:
        """The document of a checkpoint, without what belongs to one model."""
        return {
            "steps": self.steps,
            "batches": self.stream.delivered,
            "position": self.stream.positions.document(),
            "seed": self.seed,
            "strategy": str(self.strategy),
            "workers": self.workers,
            "about": about,
        }

    def snapshot(
        self,
        document: dict[str, Any],
        averages: Averages,
        states: list[dict[str, Tensor]] | None = None,
    ) -> checkpoint.Checkpoint:
        """The state of this replica; `states` of the syncs, if all ranks have computed them."""
        from shoal.train.state import snapshot

        document = {**document, "averages": [tied for _, tied in averages]}
        saved = snapshot(self.models, states or [{} for _ in self.models], document)
        for i, (tensors, _) in enumerate(averages):
            saved.model |= {f"ema{i}:{name}": tensor for name, tensor in tensors.items()}
        return saved

    def fit_averages(self, saved: checkpoint.Checkpoint, where: Path) -> list[dict[str, Tensor]]:
        from shoal.train.restore import fit_others

        emas = [(ema.model, ema.steps[0].shard) for ema in self.emas]
        return fit_others(emas, "ema", saved, where)

    # ------------------------------------------------------------------ elastic runs

    def pack(self) -> dict[str, Any]:
        """See `TrainingState`."""
        with ExitStack() as stack:
            for step in self.models:
                if not step.sync.undo_steps:  # else a newcomer gets what this replica has
                    stack.enter_context(step.sync.full_weights(optimizer=True))
            averages = [ema.gather(True) for ema in self.emas]
            states = [step.sync.state() if step.sync.undo_steps else {} for step in self.models]
            steps = max((step.steps for step in self.models), default=self.steps)
            saved = self.snapshot({"steps": steps}, averages, states)
        document = json.loads(json.dumps(saved.document))
        return {"model": saved.model, "optimizer": saved.optimizer, "document": document}

    def unpack(self, state: dict[str, Any], is_new: bool) -> None:
        """See `TrainingState`."""
        from shoal.train.restore import fit

        saved = checkpoint.Checkpoint(state["model"], state["optimizer"], state["document"])
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
        """See `UnshardedState`."""
        from shoal.train.unsharded_state import pack_unsharded

        return pack_unsharded(self.models, self.emas, self.steps)

    def unpack_unsharded(self, state: dict[str, Any]) -> None:
        """See `UnshardedState`."""
        from shoal.train.unsharded_state import unpack_unsharded

        self._start_late(unpack_unsharded(state, self.models, self.emas))

    def _start_late(self, steps: int) -> None:
        """Go on after these steps of the others."""
        config = self.services.config
        if config.generation:
            run_dir = config.run_dir  # on another host the launcher knows where it was lost
            lost_at = 0 if run_dir is None else run_dir.steps_done(self.rank) or 0
            self.note_return(Comeback(steps, lost_at))
        self.steps = steps
        if steps:
            self.count(steps)
        self.stream.restore(steps, None)
        self.throughput.restart()
