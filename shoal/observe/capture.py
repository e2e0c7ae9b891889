"""What a verification run leaves behind: every step's loss and every final tensor.

Of a shoal.Embedding these are the rows that were looked up, and their ids.

`shoal verify` runs a script several times and asks for a capture through the environment:

    SHOAL_CAPTURE_DIR      where rank 0 writes
    SHOAL_CAPTURE_STEPS    stop the script after so many steps
    SHOAL_CAPTURE_PARTS    add up in another order: each micro-batch in so many parts
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.comm.group import Op
from shoal.data.sampling import WholeBatch
from shoal.pytree import tensors_of
from shoal.replica.tensor.attention import SplitAttention
from shoal.train.job import Job
from shoal.train.state import whole_model
from shoal.train.step import Step


class Enough(BaseException):
    """The asked number of steps is done; no error, and no business of the script."""


class Capture:
    def __init__(self, job: Job, folder: Path, steps: int, parts: int):
        self.job = job
        self.folder = folder
        self.steps = steps
        self.parts = parts
        self.losses: list[float] = []
        self.additions = 0
        self.switched_off: list[str] = []
        self._seen: list[Step] = []
        job.on_step.append(self._after_step)
        job.on_build.append(self._prepare)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], job: Job) -> Capture | None:
        folder = environ.get("SHOAL_CAPTURE_DIR")
        if not folder:
            return None
        steps = int(environ.get("SHOAL_CAPTURE_STEPS", "20"))
        job.dry = True
        return cls(job, Path(folder), steps, int(environ.get("SHOAL_CAPTURE_PARTS", "1")))

    def _prepare(self, step: Step) -> None:
        if self.parts > 1:
            step.add_up_differently(self.parts)
        self._seen.append(step)
        if not step.options.exact:
            self.switched_off += switch_off_dropout(step.model)

    def _after_step(self, step: Step, loss: Tensor) -> None:
        self.losses.append(float(loss))
        self.additions = max(self.additions, additions_in(step))
        if step.steps >= self.steps:
            raise Enough

    def write(self) -> None:
        """All ranks call it: it also asks whether the replicas hold the same parameters."""
        with ExitStack() as stack:
            for step in self._seen:
                stack.enter_context(step.sync.full_weights())
            self._write_whole()

    def _write_whole(self) -> None:
        apart = [self._distance_between_replicas(step) for step in self._seen]
        if self.job.replica != 0:
            return
        tensors: dict[str, Tensor] = {}
        for i, step in enumerate(self._seen):
            prefix = f"{i}:" if len(self._seen) > 1 else ""
            found, _ = whole_model(step)
            if self.job.rank == 0:
                found |= used_rows(step)
            tensors |= {prefix + name: tensor for name, tensor in found.items()}
        if self.job.rank != 0:
            return
        save_file(tensors, self.folder / "final.safetensors")
        document = {
            "losses": self.losses,
            "additions": self.additions,
            "replicas_apart": max(apart, default=0.0),
            "switched_off": self.switched_off,
            "exact": all(step.options.exact for step in self._seen),
        }
        (self.folder / "capture.json").write_text(json.dumps(document))

    def _distance_between_replicas(self, step: Step) -> float:
        low = step.flat.data.clone()
        high = step.flat.data.clone()
        step.mesh.dp.all_reduce(low, Op.MIN).wait()
        step.mesh.dp.all_reduce(high, Op.MAX).wait()
        furthest = (high - low).abs().max()
        step.mesh.world.all_reduce(furthest, Op.MAX).wait()
        return float(furthest)


def used_rows(step: Step) -> dict[str, Tensor]:
    """The rows of each shoal.Embedding that the steps have looked up, in the order of their ids."""
    found = {}
    for embedding in step.embeddings:
        state = embedding.state()
        if state:
            ids, order = state["ids"].sort()
            found[f"{embedding.spec.name}/ids"] = ids
            found[f"{embedding.spec.name}/rows"] = state["rows"][order]
    return found


def additions_in(step: Step) -> int:
    """At most so many terms make up one element of a gradient: samples times positions."""
    batch = step.latest
    if batch is None:
        return 1
    if isinstance(batch, WholeBatch):
        return batch.total
    tensors = [t for t in tensors_of(batch) if t.dim() > 0 and len(t)]
    positions = max(t.numel() // len(t) for t in tensors)
    return batch.total * positions


def switch_off_dropout(model: nn.Module) -> list[str]:
    """Masks differ with the number of workers unless exact; without them the rest can be seen."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            module.p = 0.0
            found.append(name)
        if isinstance(module, nn.MultiheadAttention | SplitAttention) and module.dropout > 0:
            module.dropout = 0.0
            found.append(name)
    return found
