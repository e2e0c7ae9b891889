"""How much memory a worker will need, told before anything is allocated.

`shoal memory` runs the script in one process and asks for it (`RunConfig.memory_estimate`).
Parameters then go to the meta device as modules are made. The first call of a step runs one
worker's micro-batch through the model on fake tensors, which have shapes and no memory, and adds
up what autograd saves; the optimizer takes a step on the meta device, which shows its state. The
strategy's arithmetic does the rest. A second call ends the script.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from shoal.data.sampling import num_rows, take
from shoal.observe.capture import StopTraining
from shoal.pytree import map_tensors
from shoal.replica.flat_params import FlatParams
from shoal.replica.fsdp.wrapping import wrap_modules
from shoal.replica.microbatch import Loss, call_model, fork_rng
from shoal.runtime.config import MemoryEstimateConfig
from shoal.strategy.base import SyncTerm
from shoal.strategy.strategy import Strategy, as_strategy
from shoal.strategy.terms import Ddp, Hogwild, Ps, Single, Zero
from shoal.sync.base import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES
from shoal.sync.ddp import LARGE_BYTES
from shoal.sync.optimizer_step import OptimizerFactory, make_optimizer
from shoal.sync.zero import ON_THE_WAY, bytes_of_shards, owned_buckets
from shoal.train.job import Job
from shoal.train.options import StepOptions

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Memory:
    """Bytes that one worker takes at its fullest; None where it cannot be told."""

    parameters: int  # with buffers; what is gathered for a moment is not in it
    gathered: int  # of other workers' parameters, at a time
    gradients: int
    optimizer: int
    activations: int | None  # what backward needs of one micro-batch

    def plus(self, other: Memory) -> Memory:
        """Of two models that are trained in turn: activations are not held at once."""
        known = [m.activations for m in (self, other) if m.activations is not None]
        return Memory(
            self.parameters + other.parameters,
            self.gathered + other.gathered,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            max(known) if len(known) == 2 else None,
        )


@dataclass(frozen=True)
class Sizes:
    """A model as the arithmetic sees it."""

    flat: FlatParams  # on the meta device
    untrained: int  # bytes of buffers and frozen parameters
    units: list[int]  # bytes that are gathered together under zero(3); the root unit first
    state: dict[str, int]  # bytes of optimizer state of each parameter
    activations: int | None


def memory_of(strategy: Strategy, workers: int, sizes: Sizes) -> list[Memory]:
    """What each worker holds.

    Where a replica is split (tp, pp) its workers are taken to hold equal parts, which is what a
    balanced split comes to.
    """
    layout = strategy.layout(workers)
    part = strategy.sync_for(layout.replicas)
    split = layout.tp * layout.pp
    replica = [_of_replica(part, rank, layout.replicas, sizes) for rank in range(layout.replicas)]
    return [_share(memory, split) for memory in replica for _ in range(split)]


def _of_replica(part: SyncTerm, rank: int, replicas: int, sizes: Sizes) -> Memory:
    flat = sizes.flat
    width = flat.data.element_size()
    own = slice(flat.offset, flat.size)
    if isinstance(part, Zero):
        own = flat.shards(replicas)[rank]
    stage = part.stage if isinstance(part, Zero) else 0
    sharded = stage == 3 and replicas > 1
    held = (own.stop - own.start if sharded else flat.size) * width
    gathered = sizes.units[0] + 2 * max(sizes.units[1:], default=0) if sharded else 0
    server_updates = isinstance(part, Ps) and part.update == "server"
    names = [flat.named[i][0] for i in flat.params_in(own)]
    return Memory(
        held + sizes.untrained,
        gathered,
        _gradients(part, rank, replicas, flat),
        0 if server_updates else sum(sizes.state[name] for name in names),
        sizes.activations,
    )


def _gradients(part: SyncTerm, rank: int, replicas: int, flat: FlatParams) -> int:
    """The buffer that is kept, and what backward leaves at parameters until a bucket is full."""
    width = flat.data.element_size()
    numel = [p.numel() for p in flat.params]
    if isinstance(part, Single | Hogwild):
        return sum(numel) * width
    if isinstance(part, Zero):
        owned = owned_buckets(flat, replicas, bytes_of_shards(flat, replicas))
        most = max(sum(numel[i] for i in flat.params_in(bucket)) for _, bucket in owned)
        if part.stage == 1:
            return (flat.size - flat.offset + most) * width
        lent: list[int] = sorted(b.stop - b.start for owner, b in owned if owner != rank)
        kept: int = sum(b.stop - b.start for owner, b in owned if owner == rank)
        return (kept + sum(lent[-ON_THE_WAY:]) + most) * width
    size = int(part.bucket_mb * (1 << 20)) if isinstance(part, Ddp) else DEFAULT_BUCKET_BYTES
    large = {i for i, n in enumerate(numel) if n * width >= LARGE_BYTES}
    buckets = flat.buckets(size, min(size, FIRST_BUCKET_BYTES))
    most = max(sum(numel[i] for i in flat.params_in(b) if i not in large) for b in buckets)
    return (flat.size + sum(numel[i] for i in large) + most) * width


def _share(memory: Memory, split: int) -> Memory:
    numbers = {k: None if v is None else math.ceil(v / split) for k, v in asdict(memory).items()}
    return Memory(**numbers)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ measuring shapes


def sizes_of(
    model: nn.Module, loss: Loss, optimizer: OptimizerFactory, micro: Any, precision: str
) -> tuple[Sizes, str | None]:
    """Sizes of a model, and why its activations cannot be told, if so. Allocates nothing."""
    activations = None
    why = None
    try:
        activations = activation_bytes(model, loss, micro, precision)
    except Exception as error:  # whatever the user's model does with a fake tensor
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    units = [sum(p.nbytes for p in unit.params) for unit in wrap_modules(model, trained)]
    ids = {id(p) for p in trained}
    others = [*(p for p in model.parameters() if id(p) not in ids), *model.buffers()]
    meta = [
        (name, nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
        for name, p in model.named_parameters()
    ]
    flat = FlatParams(meta)
    state = state_bytes(flat.named, optimizer)
    return Sizes(flat, sum(t.nbytes for t in others), units, state, activations), why


def state_bytes(
    named: list[tuple[str, nn.Parameter]], optimizer: OptimizerFactory
) -> dict[str, int]:
    """What an optimizer keeps for each parameter after its first step."""
    made = make_optimizer(optimizer, named)
    for _, p in named:
        p.grad = torch.zeros_like(p)
    made.step()
    found = {}
    for name, p in named:
        p.grad = None
        tensors = [v for v in made.state[p].values() if isinstance(v, Tensor)]
        found[name] = sum(t.nbytes for t in tensors)
    return found


def activation_bytes(model: nn.Module, loss: Loss, micro: Any, precision: str) -> int:
    """What autograd saves of a micro-batch, parameters aside, each memory once."""
    with FakeTensorMode(allow_non_fake_inputs=True), fork_rng(torch.device("cpu")):
        fake = {
            name: torch.empty(t.shape, dtype=t.dtype).requires_grad_(t.requires_grad)
            for name, t in [*model.named_parameters(), *model.named_buffers()]
        }
        pair = map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype), tuple(micro))
        saved = Saved(fake.values())
        dtype = _AUTOCAST.get(precision)
        with (
            torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None),
            saved_tensors_hooks(saved.note, lambda tensor: tensor),
        ):
            outputs = call_model(_With(model, fake), pair[0])
            loss(outputs, pair[1])
        return saved.total


class _With(nn.Module):
    """The model with other parameters."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]):
        super().__init__()
        self._call: Callable[..., Any] = lambda *args, **kwargs: functional_call(
            model, tensors, args, kwargs
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class Saved:
    """Adds up the memory of saved tensors; those of `known` tensors do not count."""

    def __init__(self, known: Iterable[Tensor]):
        self._known = {t.untyped_storage()._cdata for t in known}
        self._seen: dict[int, Any] = {}
        self.total = 0

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known and storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage  # kept, so that its number is not given again
            self.total += storage.nbytes()
        return tensor

    def forget(self) -> None:
        self._seen = {}
        self.total = 0


# ------------------------------------------------------------------------------ the script's run


class EstimateJob(Job):
    """A job that looks at what it is given and trains nothing."""

    def prepare(self, strategy: Strategy, workers: int) -> None:
        self.dry = True
        self._for = (strategy, workers)
        self._found: list[list[Memory]] = []
        self._whys: list[str] = []

    def step(self, model: nn.Module, loss: Loss, **options: Any) -> Any:
        optimizer = options.pop("optimizer")
        given = {k: v for k, v in options.items() if k in StepOptions.__dataclass_fields__}
        chosen = StepOptions(**given)
        called = False

        def first_call(batch: Any) -> Tensor:
            nonlocal called
            if called:
                raise StopTraining
            called = True
            self._look(model, loss, optimizer, batch, chosen)
            return torch.zeros(())

        return first_call

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        raise StopTraining

    def load(self, path: str | Path) -> dict[str, Any]:
        return {}

    def _look(
        self, model: nn.Module, loss: Loss, optimizer: Any, batch: Any, options: StepOptions
    ) -> None:
        strategy, workers = self._for
        replicas = strategy.layout(workers).replicas
        parts = options.microbatches if options.exact else replicas * options.accumulate
        rows = max(1, math.ceil(num_rows(tuple(batch)) / parts))
        micro = map_tensors(lambda t: take(t, [range(rows)]) if t.dim() else t, tuple(batch))
        sizes, why = sizes_of(model, loss, optimizer, micro, options.precision)
        self._found.append(memory_of(strategy, workers, sizes))
        self._whys += [why] if why else []

    def write(self, folder: Path) -> None:
        if not self._found:
            return
        total = self._found[0]
        for more in self._found[1:]:
            total = [a.plus(b) for a, b in zip(total, more, strict=True)]
        document = {"workers": [asdict(memory) for memory in total], "unknown": self._whys}
        (folder / "estimate.json").write_text(json.dumps(document))


def estimate_memory(
    config: MemoryEstimateConfig, train: Callable[[Job], Any], make: Callable[[type[Job]], Job]
) -> bool:
    """Whether this run is only an estimate; it is then done."""
    folder = config.folder
    if folder is None:
        return False
    job = make(EstimateJob)
    assert isinstance(job, EstimateJob)
    job.prepare(as_strategy(config.strategy), config.workers)
    try:
        with parameters_without_memory():
            train(job)
    except StopTraining:
        pass
    job.write(folder)
    return True


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules that are made inside the block have their parameters on the meta device.

    Those of torch make them there; from others they go there, one by one, as they are registered.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            kind = type(param) if type(param) is nn.Parameter else nn.Parameter
            self._parameters[name] = kind(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with _MadeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _MadeOnMeta(TorchFunctionMode):
    """`torch.empty` of a module of torch takes no memory; it would be filled and used as weights.

    Modules ask for it without a device unless they were told one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and _is_torch_module(1):
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _is_torch_module(above: int) -> bool:
    """Whether the code so many calls above the caller is that of a module of torch."""
    name = sys._getframe(above + 1).f_globals.get("__name__", "")
    return bool(name.startswith("torch.nn.modules."))
