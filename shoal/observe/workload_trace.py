"""The workload of a user's script: its model, loss, optimizer and first batch, traced.

`shoal predict` and `shoal plan` run the script in one process and ask for it
(`RunConfig.workload_trace`). As for `shoal memory`, parameters are on the meta device, and the
second call of a step ends the script.
"""

from __future__ import annotations

import inspect
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.errors import ShoalError, StopTraining
from shoal.observe.memory_estimate import EstimateJob, first_line, first_step
from shoal.observe.model_sizes import activation_bytes, row_tables, sizes_of
from shoal.plan.tracing.module import AUTOCAST, precision_of, sum_of, trace_module
from shoal.plan.workloads import Precision, SplitLimits, StoredRows
from shoal.plan.workloads.traced_workload import TracedWorkload
from shoal.replica.expert.mixtures import mixtures_of
from shoal.replica.flat_params import FlatParams
from shoal.replica.fsdp.unit_gather import cast_params, wrap_modules
from shoal.replica.microbatch_context import Loss, autocast_for, call_model
from shoal.replica.tensor.plan import plan_of
from shoal.runtime.config import PROFILE, WorkloadTraceConfig
from shoal.runtime.pytree import Tree
from shoal.runtime.wording import counted
from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES, LARGE_BYTES
from shoal.strategy.split_terms import Tp
from shoal.strategy.strategy import as_strategy
from shoal.sync.ddp import ddp_buckets
from shoal.sync.optimizer_step import OptimizerFactory, make_optimizer
from shoal.train.data.rows import move_to, num_rows, take_rows
from shoal.train.job import Job
from shoal.train.step.cut_batch import ForwardSignature
from shoal.train.step.options import StepOptions

TP_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


class WorkloadJob(EstimateJob):
    """A job that traces the first step that it is given."""

    _document: dict[str, Any] | None = None
    _models: tuple[nn.Module, ...] = ()  # of a loop of the script's own

    def setup(self, *objects: Any, **options: Any) -> Any:
        """In a loop of the script's own: the first call of its model, and no loss."""
        self._models += tuple(one for one in objects if isinstance(one, nn.Module))
        models = self._models
        optimizers = [one for one in objects if isinstance(one, torch.optim.Optimizer)]
        if len(models) != 1 or len(optimizers) != 1:
            self._document = {
                "error": f"the script trains {counted(len(models), 'model')} in a loop of its own "
                "(job.setup); one model with one optimizer can be traced"
            }
            raise StopTraining

        def first_call(model: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(model, optimizers[0], (args, kwargs))
            raise StopTraining

        models[0].register_forward_pre_hook(first_call, with_kwargs=True)
        return objects[0] if len(objects) == 1 else objects

    def _note(self, model: nn.Module, optimizer: torch.optim.Optimizer, content: Tree) -> None:
        model._forward_pre_hooks.clear()
        kind: Any = type(optimizer)
        known = inspect.signature(kind).parameters
        own = {key: value for key, value in optimizer.defaults.items() if key in known}

        def loss_of(batch: Any) -> Tensor:
            return sum_of(model(*batch[0], **batch[1]))

        try:
            precision = precision_for(model, lambda params: kind(params, **own), "fp32")
            workload = trace_rows_of(model, loss_of, content, precision)
        except Exception as error:  # whatever the user's model does with a fake tensor
            self._document = {"error": first_line(error)}
            return
        self._document = {"workload": workload.to_json().decode(), "batch": num_rows(content)}

    def _estimate(
        self, model: nn.Module, loss: Loss, optimizer: Any, batch: Any, options: StepOptions
    ) -> None:
        content = getattr(batch, "content", batch)
        try:
            precision = precision_for(model, optimizer, options.precision)
            workload = trace_step(model, loss, content, precision)
            tables = trace_rows(model, optimizer, loss, content)
            accumulate = options.local_microbatches(1)
            workload = replace(workload, accumulate=accumulate, row_tables=tables)
        except Exception as error:  # whatever the user's model does with a fake tensor
            self._document = {"error": first_line(error)}
            return
        self._document = {"workload": workload.to_json().decode(), "batch": num_rows(content)}

    def write(self, folder: Path) -> None:
        if self._document is not None:
            (folder / "workload.json").write_text(json.dumps(self._document))


def trace_step(model: nn.Module, loss: Loss, content: Tree, precision: Precision) -> TracedWorkload:
    """The workload of a step with this batch."""

    def loss_of(batch: Tree) -> Tensor:
        inputs, targets = ForwardSignature(model).arguments(batch, num_rows(batch))
        return loss(call_model(model, inputs), targets)

    return trace_rows_of(model, loss_of, content, precision)


def trace_rows_of(
    model: nn.Module, loss_of: Callable[[Any], Tensor], content: Tree, precision: Precision
) -> TracedWorkload:
    """The workload of a loss of this batch, traced with all and with half of its rows."""
    total = num_rows(content)
    smaller = max(1, total // 2)
    ranges = {total: [range(total)], smaller: [range(smaller)]}
    if total == 1:
        ranges = {1: [range(1)], 2: [range(1), range(1)]}
    batches = {rows: take_rows(content, picked, total) for rows, picked in ranges.items()}
    names = {id(p): name for name, p in model.named_parameters()}
    mixtures = mixtures_of(model)
    experts = {m.name: frozenset(names[id(p)] for p in m.parameters) for m in mixtures}
    traced = trace_module(model, loss_of, batches, precision, tp_roles(model), experts=experts)
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    units = wrap_modules(model, trained)  # in which zero(3) would gather
    unit_of = {names[id(p)]: number for number, unit in enumerate(units) for p in unit.params}
    is_autocast = precision.compute in AUTOCAST
    cast = {names[id(p)] for p in cast_params(units)} if is_autocast else set()
    held = tuple(
        tensor._replace(unit=unit_of.get(tensor.name, 0), is_cast=tensor.name in cast)
        for tensor in traced.held
    )
    sizes = tuple(size for size in TP_SIZES if tp_roles(model, size))
    limits = SplitLimits(tp_sizes=sizes, ep=max(1, math.gcd(*(m.num_experts for m in mixtures))))
    return replace(traced, limits=limits, held=held)


def trace_rows(
    model: nn.Module, optimizer: OptimizerFactory, loss: Loss, content: Tree
) -> tuple[StoredRows, ...]:
    """The tables of rows, each with as many ids as it is asked for in a forward."""
    tables = row_tables(model, optimizer)
    ids: Counter[nn.Module] = Counter()

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        ids[module] += args[0].numel()

    with ExitStack() as stack:
        for table in tables:
            stack.callback(table.register_forward_pre_hook(note).remove)
        if tables:
            activation_bytes(model, loss, content, "fp32")
    rows = num_rows(content)
    return tuple(one._replace(ids=ids[module] / rows) for module, one in tables.items())


def precision_for(model: nn.Module, optimizer: OptimizerFactory, precision: str) -> Precision:
    """Bytes of each number, as Shoal trains: parameters keep their type under autocast."""
    sizes = sizes_of(model, optimizer)
    state = round(sizes.whole_state / max(1, sizes.layout.trained))
    own = precision_of(model, state)
    compute = precision if precision in ("bf16", "fp16") else own.compute
    return Precision(compute, own.parameter_bytes, own.gradient_bytes, 0, state)


def tp_roles(model: nn.Module, ranks: int = 2) -> dict[str, str]:
    """How tp would split the modules of a model, by name, as `trace_module` takes it."""
    try:
        found = plan_of(model, Tp(ranks))
    except ShoalError:
        return {}
    kinds = {"attention": "whole", "experts": "whole", "vocabulary": "vocabulary", "row": "row"}
    named = {
        name: ("gathered" if role.output == "full" else "column")
        if role.kind == "column"
        else kinds.get(role.kind)
        for name, role in found.items()
    }
    return {name: kind for name, kind in named.items() if kind is not None}


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

    def setup(self, *objects: Any, **options: Any) -> Any:
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
        begin, end = sums.amax(dim=0).unbind(dim=1)  # ranks of a host have one clock
        self._document = {
            "rows": num_rows(content),
            **_summary(everywhere.flatten(0, 1)),
            **passes.unbroken(content),
            "slowest": _slowest(everywhere),
            "gradients_s": float((end - begin).median()),
            "ready": passes.ready(),
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
        self._moments_s: list[float] = []  # at which buckets were full
        self._ready: list[list[float]] = []  # by step, as shares of backward

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
        """On a GPU: seconds of a step if the host does not wait, and to launch it."""
        if self._device.type != "cuda":
            return {}
        hosts_s = []
        start_s = self._now()
        for _ in range(_FEWEST):
            self._backward(self._forward(content))
            self._update()
        whole_s = (self._now() - start_s) / _FEWEST
        for _ in range(_FEWEST):
            start_s = self._now()
            self._backward(self._forward(content))
            self._update()
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

    def _forward(self, content: Any) -> Tensor:
        with self._autocast():
            rows = num_rows(content)
            inputs, targets = ForwardSignature(self._model).arguments(content, rows)
            return self._loss(call_model(self._model, inputs), targets)

    def _backward(self, loss: Tensor) -> None:
        """Copies to buckets belong to it; the sums, which ddp begins meanwhile, come later."""
        self._full.clear()
        self._moments_s = [time.perf_counter()]
        self._flat.grads.arm(self._note_full)
        loss.backward()  # type: ignore[no-untyped-call]
        self._flat.grads.flush()
        start_s = self._moments_s[0]
        took_s = time.perf_counter() - self._moments_s[0]
        self._ready.append([(at_s - start_s) / took_s for at_s in self._moments_s[1:]])

    def _note_full(self, bucket: slice) -> None:
        self._full.append(bucket)
        self._moments_s.append(time.perf_counter())

    def ready(self) -> list[tuple[float, float]]:
        """Shares of the parameters whose gradients are there, and of backward at that moment."""
        if self._device.type == "cuda":  # it runs behind its host
            return []
        shares = [statistics.median(column) for column in zip(*self._ready, strict=True)]
        done = [1 - bucket.start / self._flat.size for bucket in self._full]
        return list(zip(done, shares, strict=True))

    def _sum_gradients(self) -> None:
        tensors = self._flat.grads.tensors
        full = [one for bucket in self._full for one in tensors[bucket.start]]
        for under_way in [self._group.all_reduce(one) for one in full]:
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
    """What the slowest rank needs from one sum, before the update, to the next, over the mean."""
    between = everywhere[:, 1:, :2].sum(dim=2) + everywhere[:, :-1, 2]
    return _trimmed_mean(between.amax(dim=0) / between.mean(dim=0))


def _trimmed_mean(numbers: Tensor) -> float:
    first, last = (round(share * len(numbers)) for share in _KEPT)
    return float(numbers.sort().values[first:last].mean())


def _summary(passes: Tensor) -> dict[str, Any]:
    columns = dict(zip(PassTimes._fields, passes.unbind(dim=1), strict=True))
    quarters = torch.tensor([0.25, 0.75], dtype=passes.dtype)
    quartiles = {name: column.quantile(quarters).tolist() for name, column in columns.items()}
    means = {name: _trimmed_mean(column) for name, column in columns.items()}
    return {**means, "quartiles": quartiles}


def study_workload(
    config: WorkloadTraceConfig, train: Callable[[Job], Any], make: Callable[[type[Job]], Job]
) -> None:
    """Trace the first step of the script, or measure it, and write what was found."""
    assert config.folder is not None
    alone = as_strategy("single")
    if config.profile_s:
        first_step(ProfileJob, train, make, alone, seconds=config.profile_s).write(config.folder)
    else:
        first_step(WorkloadJob, train, make, alone).write(config.folder)
