"""What a verification run writes: the loss of every step and every final tensor.

capture.json             losses, and what else `verify.py` asks about
final.safetensors        the model; of a shoal.Embedding the rows that were looked up, and ids
start, early             one worker: the model before the first step, and after `early` steps
optimizer.safetensors    in double precision: the state of the optimizer

A script's model computes in float64 without a change of the script. Rounding becomes 2²⁹ times
smaller there, and an error does not: that is how `shoal verify` tells one from the other.
Parameters and buffers become float64 before a step is built. While the model and the loss compute,
a function that gets tensors of both types gets float64, and a place that names float32
(`x.float()`, `softmax(…, dtype=torch.float32)`) means float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.comm.group import Op
from shoal.errors import StopTraining
from shoal.replica.batchnorm import has_batchnorm
from shoal.replica.pipeline.replay_lineage import writes
from shoal.replica.tensor.linear import ParallelAttention
from shoal.runtime.config import CaptureConfig
from shoal.runtime.pytree import tensors_of
from shoal.schedules.pipelines import accumulate
from shoal.strategy.base import Batches
from shoal.train.checkpoints.state import gather_model, gather_optimizer_state
from shoal.train.data.sampling import FullDatasetBatch
from shoal.train.job import Job
from shoal.train.step.step import Step


def switch_off_dropout(model: nn.Module) -> list[str]:
    """Rates of dropout become 0, since masks depend on the number of workers; their names."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            module.p = 0.0
            names.append(name)
        if isinstance(module, nn.MultiheadAttention | ParallelAttention) and module.dropout > 0:
            module.dropout = 0.0
            names.append(name)
        for owner in (module, getattr(module, "config", None)):
            for key, value in list(getattr(owner, "__dict__", {}).items()):
                if type(value) is float and value > 0 and ("drop" in key or "jitter" in key):
                    setattr(owner, key, 0.0)  # attention_dropout, layerdrop, jitter_noise
                    names.append(f"{name}.{key}" if name else key)
    return names


def watch_draws(model: nn.Module) -> list[str]:
    """Gets the modules whose forward draws from torch's global generator, the innermost first."""
    found: list[str] = []
    states: list[Tensor] = []  # before the forwards that are under way

    def note(module: nn.Module, args: Any) -> None:
        states.append(torch.get_rng_state())

    def compare(name: str, module: nn.Module, args: Any, outputs: Any) -> None:
        if not torch.equal(states.pop(), torch.get_rng_state()):
            kind = type(module).__name__
            found.append(f"{name} ({kind})" if name else kind)

    for name, module in model.named_modules():
        module.register_forward_pre_hook(note)
        module.register_forward_hook(partial(compare, name))
    return found


IGNORE_INDEX = -100  # of torch's losses


class Capture:
    """Records a job, and stops it after some steps."""

    def __init__(self, job: Job, config: CaptureConfig):
        assert config.folder is not None
        self.job = job
        self.folder = config.folder
        self.config = config
        self.losses: list[float] = []
        self.additions = 0
        self.switched_off: list[str] = []
        self.ignored_targets: str | None = None
        self.has_ragged_targets = False
        self.is_over = False
        self.goes_on = False
        self._draws: list[list[str]] = []  # of each model
        self._built: list[Step] = []
        job.on_step.append(self._after_step)
        job.on_build.append(self._prepare)
        if config.double:
            job.before_build.append(nn.Module.double)  # integers and complex numbers stay

    @classmethod
    def start(cls, config: CaptureConfig, job: Job, number: int) -> Capture:
        """`number` is that of the call of `shoal.run`; each has a folder."""
        assert config.folder is not None
        job.checkpoints.dry = True
        folder = config.folder if number == 1 else config.folder / str(number)
        folder.mkdir(exist_ok=True)
        return cls(job, replace(config, folder=folder))

    def _prepare(self, step: Step) -> None:
        if self.config.pieces > 1:
            reorder_additions(step, self.config.pieces)
        if self.config.double:
            compute_in_double(step)
        self._built.append(step)
        if not step.options.exact:
            self.switched_off += switch_off_dropout(step.model)
        if self.job.size == 1:
            self._draws.append(watch_draws(step.model))
            self._save("start", self._tensors)

    def _after_step(self, step: Step, loss: Tensor) -> None:
        self.goes_on |= self.is_over
        self.losses.append(float(loss))
        self.additions = max(self.additions, additions_in(step))
        self.ignored_targets = self.ignored_targets or ignored_targets(step)
        self.has_ragged_targets |= has_ragged_targets(step)
        if self.job.steps == self.config.early and self.job.size == 1:
            self._save("early", self._tensors)
        if self.job.steps >= self.config.steps:
            self.is_over = True
            raise StopTraining

    def write(self) -> None:
        """All ranks call it, since it also compares the parameters of the replicas."""
        if self.config.double or self.config.optimizer:
            with self._full_weights(optimizer=True):
                self._save("optimizer", lambda step: gather_optimizer_state(step)[0])
        with self._full_weights():
            apart = [self._distance_between_replicas(step) for step in self._built]
            self._save("final", self._tensors)
        document = {
            "losses": self.losses,
            "additions": self.additions,
            "replicas_apart": max(apart, default=0.0),
            "switched_off": self.switched_off,
            "exact": all(step.options.exact for step in self._built),
            "ignored_targets": self.ignored_targets,
            "has_ragged_targets": self.has_ragged_targets,
            "goes_on": self.goes_on,
            "draws": next((names[0] for names in self._draws if names), None),
        }
        if self.job.rank == 0:
            (self.folder / "capture.json").write_text(json.dumps(document))

    @contextmanager
    def _full_weights(self, optimizer: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            for step in self._built:
                stack.enter_context(step.sync.full_weights(optimizer))
            yield

    def _save(self, name: str, gather: Callable[[Step], dict[str, Tensor]]) -> None:
        """The tensors of all steps by name, at rank 0; the workers of replica 0 gather them."""
        if self.job.replica != 0:
            return
        tensors: dict[str, Tensor] = {}
        for i, step in enumerate(self._built):
            prefix = f"{i}:" if len(self._built) > 1 else ""
            tensors |= {prefix + key: tensor for key, tensor in gather(step).items()}
        if self.job.rank == 0:
            save_file(tensors, self.folder / f"{name}.safetensors")

    def _tensors(self, step: Step) -> dict[str, Tensor]:
        """A model and the rows of its embeddings; complex tensors as pairs of numbers."""
        named, _ = gather_model(step)
        if self.job.rank == 0:
            named |= used_rows(step)
        return {
            name: torch.view_as_real(t.resolve_conj()).clone() if t.is_complex() else t
            for name, t in named.items()
        }

    def _distance_between_replicas(self, step: Step) -> float:
        low = step.flat.data.clone()
        high = step.flat.data.clone()
        step.mesh.dp.all_reduce(low, Op.MIN).wait()
        step.mesh.dp.all_reduce(high, Op.MAX).wait()
        furthest = (high - low).abs().max()
        step.mesh.world.all_reduce(furthest, Op.MAX).wait()
        return float(furthest)


def reorder_additions(step: Step, pieces: int) -> None:
    """Compute the same steps with additions in another order, to measure rounding.

    Each micro-batch is computed in `pieces`, as that many workers would. Where the model needs
    whole micro-batches (BatchNorm), or the script computes them itself, their samples are
    reversed instead.
    """
    if (
        step.options.exact
        or step.is_own_loop
        or has_batchnorm(step.model)
        or step.term.batches is Batches.WHOLE_DATASET
    ):
        step.cutter.reverses = True
    else:
        step.cutter.local_microbatches *= pieces
        step.engine.actions = accumulate(step.cutter.local_microbatches)


def ignored_targets(step: Step) -> str | None:
    """How `count` would name targets of which a loss ignores some; None where there are none."""
    for name, item in _items_of(step):
        integers = [t for t in tensors_of(item) if t.dtype == torch.int64]
        if any(bool((t == IGNORE_INDEX).any()) for t in integers):
            return name
    return None


def has_ragged_targets(step: Step) -> bool:
    """Whether each sample has as many targets as it likes, such as boxes."""
    return any(isinstance(item, list) for name, item in _items_of(step) if name != "batch[0]")


def _items_of(step: Step) -> list[tuple[str, Any]]:
    """The parts of the latest batch, as `count` names them; nothing where the script counts."""
    batch = step.latest
    if step.cutter.count is not None or batch is None or isinstance(batch, FullDatasetBatch):
        return []
    content = batch.content
    if isinstance(content, dict):
        return [(f'batch["{key}"]', item) for key, item in content.items()]
    if isinstance(content, (tuple, list)):
        return [(f"batch[{i}]", item) for i, item in enumerate(content)]
    return [("batch", content)]


def used_rows(step: Step) -> dict[str, Tensor]:
    """The rows of each shoal.Embedding that the steps have looked up, in the order of their ids."""
    rows = {}
    for embedding in step.embeddings:
        state = embedding.state()
        name = embedding.spec.name
        if "ids" in state:
            rows[f"{name}/ids"], order = state["ids"].sort()
            rows[f"{name}/rows"] = state["rows"][order]
    return rows


def additions_in(step: Step) -> int:
    """The largest number of terms in one element of a gradient: samples times positions."""
    batch = step.latest
    if batch is None:
        return 1
    if isinstance(batch, FullDatasetBatch):
        return batch.total
    tensors = [t for t in tensors_of(batch) if t.dim() > 0 and len(t)]
    return batch.total * max(t.numel() // len(t) for t in tensors)


# ------------------------------------------------------------------ double precision


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: Any = None,
) -> Tensor:
    """What `torch._grouped_mm` computes; `offs` are the ends of the groups of a 2D matrix."""
    if offs is None:
        out = torch.bmm(a, b)
    elif a.dim() == 2 and b.dim() == 3:
        pieces = zip(_groups(a, offs, 0), b, strict=True)
        out = _padded(torch.cat([x @ y for x, y in pieces]), len(a), 0)
    elif a.dim() == 3:
        pieces = zip(a, _groups(b, offs, 1), strict=True)
        out = _padded(torch.cat([x @ y for x, y in pieces], 1), b.shape[1], 1)
    else:
        pieces = zip(_groups(a, offs, 1), _groups(b, offs, 0), strict=True)
        out = torch.stack([x @ y for x, y in pieces])
    return out if bias is None else out + bias


def _groups(tensor: Tensor, offs: Tensor, dim: int) -> list[Tensor]:
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    return [tensor.narrow(dim, start, end - start) for start, end in zip(starts, ends, strict=True)]


def _padded(out: Tensor, size: int, dim: int) -> Tensor:
    """With zeros for what stands behind the last group."""
    rest = list(out.shape)
    rest[dim] = size - out.shape[dim]
    return torch.cat([out, out.new_zeros(rest)], dim) if rest[dim] else out


_NARROW = (torch.float16, torch.bfloat16, torch.float32)
_GROUPED_MM = getattr(torch, "_grouped_mm", grouped_mm)  # F.grouped_mm calls it, too


class DoublePrecision(TorchFunctionMode):
    """Inside the block functions of torch compute in float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        if func is _GROUPED_MM:
            func = grouped_mm
        dtypes = {t.dtype for t in tensors_of([*args, *kwargs.values()])}
        widen = torch.float64 in dtypes  # and then float32 beside it
        first = args[:1] if writes(func) else ()
        rest = [_replaced(value, widen) for value in args[len(first) :]]
        named = {key: _replaced(value, widen) for key, value in kwargs.items() if key != "out"}
        return func(*first, *rest, **named, **{k: v for k, v in kwargs.items() if k == "out"})


def compute_in_double(step: Step) -> None:
    """Model and loss of a step whose parameters are float64 compute in float64."""
    step.cutter.widens = True
    step.shard.precision = DoublePrecision
    if step.is_own_loop:  # the script computes the loss from what these return
        forward = step.model.forward

        @wraps(forward)
        def computed(*args: Any, **kwargs: Any) -> Any:
            with DoublePrecision():
                return forward(*args, **kwargs)

        step.model.forward = computed
    around = step.engine.autocast

    @contextmanager
    def both() -> Iterator[None]:
        with around(), DoublePrecision():
            yield

    step.engine.autocast = both


def _replaced(value: Any, widen: bool) -> Any:
    if isinstance(value, Tensor):
        return value.double() if widen and value.dtype in _NARROW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, widen) for item in value)
    return value
