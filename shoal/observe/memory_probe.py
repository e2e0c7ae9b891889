"""How much memory a worker took in a real run, counted in bytes of tensors."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import reduce
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.errors import StopTraining
from shoal.observe.memory_estimate import WorkerMemory
from shoal.replica.fsdp.sharded_params import ShardedParams
from shoal.replica.microbatch_context import MicroBatch
from shoal.runtime.config import MemoryProbeConfig
from shoal.runtime.pytree import Tree, tensors_of
from shoal.schedules.steps.step import What
from shoal.sync.compressed_sum import CompressedSum
from shoal.sync.memory import MemoryCounter, tensors_held_by
from shoal.train.job import Job
from shoal.train.step.step import Step


class Probe:
    """Looks at every gradient as it comes, and at the rest after a step."""

    def __init__(self, job: Job, config: MemoryProbeConfig):
        self.job = job
        self.config = config
        self._models: dict[int, ModelProbe] = {}
        job.checkpoints.dry = True
        job.on_build.append(lambda step: self._models.update({id(step): ModelProbe(step)}))
        job.on_step.append(self._after_step)

    def write(self) -> None:
        memories = [model.memory() for model in self._models.values()]
        if memories and self.config.folder is not None:
            total = asdict(reduce(WorkerMemory.plus, memories))
            (self.config.folder / f"{self.job.rank}.json").write_text(json.dumps(total))

    def _after_step(self, step: Step, loss: Tensor) -> None:
        self._models[id(step)].look()
        if step.steps >= self.config.steps:
            raise StopTraining


class ModelProbe:
    """Counts the memory of one model's step, each byte once and in the first column that has it."""

    def __init__(self, step: Step):
        self.step = step
        self.activations = SavedBytes()
        self._most = dict.fromkeys([*(what.value for what in What), "host"], 0)
        for p in step.flat.params:
            p.register_hook(self._hook(p))  # type: ignore[no-untyped-call]
        step.flat.grads.on_copy = self.look
        if isinstance(step.flat, ShardedParams):
            step.flat.on_saved = self._note
        step.engine.loss = self._watched(step.engine.loss)
        stage = step.engine.stage
        stage.compute = self._watched(stage.compute)  # type: ignore[method-assign]
        if step.sync.load_optimizer is not None:  # it is updated chunk by chunk
            step.update.optimizer.register_step_post_hook(lambda *step: self.look())
        finish = step.sync.finish

        def look_and_finish() -> None:
            self.look()
            finish()

        step.sync.finish = look_and_finish  # type: ignore[method-assign]
        for sums in vars(step.sync).values():
            if isinstance(sums, CompressedSum):
                sums.on_stage = self.look

    def memory(self) -> WorkerMemory:
        return WorkerMemory(**self._most, activations=self.activations.most)

    def look(self, arriving: Tensor | None = None) -> None:
        """Count what there is now; `arriving` is a gradient before its parameter has it."""
        for column, value in self._count(arriving).items():
            self._most[column] = max(self._most[column], value)

    def _count(self, arriving: Tensor | None) -> dict[str, int]:
        step = self.step
        flat = step.flat
        counter = MemoryCounter()
        counts = dict.fromkeys(self._most, 0)
        counts["host"] = counter.add(step.sync.host_tensors())
        counts["gathered"] = counter.add(self._gathered())
        held = [*step.model.parameters(), *step.model.buffers()]
        if isinstance(flat, ShardedParams):
            trained = {id(p) for p in flat.params if not flat.offload}
            held = [flat.shard_data, *(t for t in held if id(t) not in trained)]
        else:
            held.append(flat.data)
        counter.add(step.sync.elsewhere())
        counts["parameters"] = counter.add(held)
        grads = [p.grad for p in flat.params if p.grad is not None]
        grads += [] if arriving is None else [arriving]
        counts["gradients"] = counter.add(
            [*grads, *flat.grads.held(), *step.sync.gradient_tensors()]
        )
        optimizers = [step.update.optimizer, *step.sync.optimizers()]
        states = [state for each in optimizers for state in each.state.values()]
        entries = [value for state in states for value in state.values()]
        counts["optimizer"] = counter.add([one for one in entries if isinstance(one, Tensor)])
        for column, tensor in tensors_held_by(step.sync):
            counts[column] += counter.add([tensor])
        counts["shared"] += step.sync.shared_bytes()
        counts["server"] = counter.add(step.sync.server_tensors())
        return counts

    def _hook(self, p: nn.Parameter) -> Callable[[Tensor], None]:
        def look(grad: Tensor) -> None:
            self.look(None if p.grad is not None else grad)

        return look

    def _note(self, tensor: Tensor) -> Tensor:
        """Autograd is about to save a tensor; what forward has gathered is here now."""
        gathered = sum(memory.nbytes for memory in self._gathered())
        self._most["gathered"] = max(self._most["gathered"], gathered)
        return self.activations.note(tensor)

    def _gathered(self) -> list[Tensor]:
        flat = self.step.flat
        return flat.gathered() if isinstance(flat, ShardedParams) else []

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            model = self.step.model
            micros = [arg for arg in args if isinstance(arg, MicroBatch)]
            self.activations.see_batch([m.inputs for m in micros] + [m.targets for m in micros])
            self.activations.known = [*model.parameters(), *model.buffers(), self.step.flat.data]
            with saved_tensors_hooks(self._note, lambda tensor: tensor):
                return function(*args, **kwargs)

        return watched


class SavedBytes:
    """Bytes of tensors that autograd keeps now, each storage once, without the `known` ones."""

    def __init__(self) -> None:
        self.known: list[Tensor] = []
        self.most = 0
        self._total = 0
        self._references: Counter[int] = Counter()  # by storage, or address in the batch
        self._batch: set[int] = set()

    def see_batch(self, trees: Sequence[Tree]) -> None:
        """Micro-batches are views of a batch; what backward needs of it is the view."""
        for tree in trees:
            self._batch |= {t.untyped_storage()._cdata for t in tensors_of(tree)}

    def note(self, tensor: Tensor) -> Tensor:
        """To be saved instead of `tensor`: an alias whose end is noticed."""
        storage = tensor.untyped_storage()
        if any(storage._cdata == t.untyped_storage()._cdata for t in self.known):
            return tensor
        alias = tensor.detach()
        key = storage._cdata
        num_bytes = storage.nbytes()
        if key in self._batch:
            key = tensor.data_ptr()
            num_bytes = tensor.nbytes
        if not self._references[key]:
            self._total += num_bytes
        self._references[key] += 1
        self.most = max(self.most, self._total)
        weakref.finalize(alias, self._forget, key, num_bytes)
        return alias

    def _forget(self, key: int, num_bytes: int) -> None:
        self._references[key] -= 1
        if not self._references[key]:
            self._total -= num_bytes
