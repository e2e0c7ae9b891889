"""How much memory a worker took in a real run, counted in bytes of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shoal.observe.capture import StopTraining
from shoal.observe.memory_estimate import Memory, Saved
from shoal.replica.fsdp.sharded_params import ShardedParams
from shoal.runtime.config import MemoryProbeConfig
from shoal.train.job import Job
from shoal.train.step import Step


class Probe:
    """Looks at every gradient as it comes, and at the rest after a step."""

    def __init__(self, job: Job, folder: Path, steps: int):
        self.job = job
        self.folder = folder
        self.steps = steps
        self._models: dict[int, _Model] = {}
        job.dry = True
        job.on_build.append(lambda step: self._models.update({id(step): _Model(step)}))
        job.on_step.append(self._after_step)

    @classmethod
    def start(cls, config: MemoryProbeConfig, job: Job) -> Probe | None:
        return None if config.folder is None else cls(job, config.folder, config.steps)

    def write(self) -> None:
        found = [model.memory() for model in self._models.values()]
        if not found:
            return
        total = found[0]
        for more in found[1:]:
            total = total.plus(more)
        (self.folder / f"{self.job.rank}.json").write_text(json.dumps(asdict(total)))

    def _after_step(self, step: Step, loss: Tensor) -> None:
        self._models[id(step)].look_after_step()
        if step.steps >= self.steps:
            raise StopTraining


class _Model:
    def __init__(self, step: Step):
        self.step = step
        self.saved = Saved(())
        self.parameters = self.gathered = self.gradients = self.optimizer = self.activations = 0
        for p in step.flat.params:
            p.register_post_accumulate_grad_hook(self._got)  # type: ignore[no-untyped-call]
        flat = step.flat
        if isinstance(flat, ShardedParams):
            flat.on_saved = self._note
        forward = step.model.forward
        loss = step.engine.loss
        step.model.forward = self._watched(forward, starts=True)
        step.engine.loss = self._watched(loss)

    def memory(self) -> Memory:
        return Memory(
            self.parameters, self.gathered, self.gradients, self.optimizer, self.activations
        )

    def look_after_step(self) -> None:
        model = self.step.model
        flat = self.step.flat
        tensors = [*model.parameters(), *model.buffers()]
        self.parameters = bytes_of([*tensors, flat.data])
        state = self.step.update.optimizer.state.values()
        self.optimizer = bytes_of(v for s in state for v in s.values() if isinstance(v, Tensor))

    def _got(self, _: Tensor) -> None:
        flat = self.step.flat
        fresh = bytes_of(p.grad for p in flat.params if p.grad is not None)
        self.gradients = max(self.gradients, fresh + self.step.sync.gradient_bytes())
        if isinstance(flat, ShardedParams):
            self.gathered = max(self.gathered, flat.resident_bytes() - flat.shard_data.nbytes)

    def _note(self, tensor: Tensor) -> Tensor:
        self.saved.note(tensor)
        self.activations = max(self.activations, self.saved.total)
        return tensor

    def _watched(self, function: Callable[..., Any], starts: bool = False) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if starts:
                known = [*self.step.model.parameters(), *self.step.model.buffers()]
                self.saved = Saved([*known, self.step.flat.data])
            with saved_tensors_hooks(self._note, lambda tensor: tensor):
                return function(*args, **kwargs)

        return watched


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Each memory once, whatever looks at it."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())
