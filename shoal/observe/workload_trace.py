"""The workload of a user's script: its model, loss, optimizer and first batch, traced.

`shoal predict` and `shoal plan` run the script in one process and ask for it
(`RunConfig.workload_trace`). As for `shoal memory`, parameters are on the meta device, and the
second call of a step ends the script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.data.rows import num_rows, take_rows
from shoal.errors import ShoalError, StopTraining
from shoal.observe.memory_estimate import EstimateJob, first_step
from shoal.observe.model_sizes import sizes_of
from shoal.plan.tracing.module import precision_of, trace_module
from shoal.plan.workloads.traced_workload import TracedWorkload
from shoal.plan.workloads.workload import HeldTensor, Precision, SplitLimits
from shoal.pytree import Tree
from shoal.replica.expert.mixtures import mixtures_of
from shoal.replica.fsdp.wrapping import wrap_modules
from shoal.replica.microbatch import Loss, call_model
from shoal.replica.tensor.plan import plan_of
from shoal.replica.tensor.roles import Role
from shoal.runtime.config import WorkloadTraceConfig
from shoal.strategy.split_terms import Tp
from shoal.strategy.strategy import as_strategy
from shoal.sync.optimizer_step import OptimizerFactory
from shoal.train.job import Job
from shoal.train.step.cut_batch import ForwardSignature
from shoal.train.step.options import StepOptions

_KINDS = {
    "attention": "whole",
    "experts": "whole",
    "vocabulary": "vocabulary",
}
TP_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


class WorkloadJob(EstimateJob):
    """A job that traces the first step that it is given."""

    _document: dict[str, Any] | None = None

    def setup(self, *objects: Any) -> Any:
        self._document = {
            "error": "the script computes its loss in a loop of its own (job.setup), which has no "
            "step to trace; job.step has one"
        }
        raise StopTraining

    def _estimate(
        self, model: nn.Module, loss: Loss, optimizer: Any, batch: Any, options: StepOptions
    ) -> None:
        content = getattr(batch, "content", batch)
        try:
            precision = precision_for(model, optimizer, options.precision)
            workload = trace_step(model, loss, content, precision)
            workload = replace(workload, accumulate=options.local_microbatches(1))
        except Exception as error:  # whatever the user's model does with a fake tensor
            text = str(error).splitlines()[0] if str(error) else ""
            self._document = {"error": f"{type(error).__name__}: {text}"}
            return
        self._document = {"workload": workload.to_json().decode(), "batch": num_rows(content)}

    def write(self, folder: Path) -> None:
        if self._document is not None:
            (folder / "workload.json").write_text(json.dumps(self._document))


def trace_step(model: nn.Module, loss: Loss, content: Tree, precision: Precision) -> TracedWorkload:
    """The workload of a step with this batch, traced with all and with half of its rows."""
    total = num_rows(content)
    smaller = max(1, total // 2)
    ranges = {total: [range(total)], smaller: [range(smaller)]}
    if total == 1:
        ranges = {1: [range(1)], 2: [range(1), range(1)]}
    batches = {rows: take_rows(content, picked, total) for rows, picked in ranges.items()}

    def loss_of(batch: Tree) -> Tensor:
        inputs, targets = ForwardSignature(model).arguments(batch, num_rows(batch))
        return loss(call_model(model, inputs), targets)

    roles = tp_roles(model)
    experts = expert_parameters(model)
    traced = trace_module(model, loss_of, batches, precision, roles, experts=experts)
    held = tuple(in_units(model, traced.held))
    return replace(traced, limits=split_limits(model), held=held)


def in_units(model: nn.Module, held: Iterable[HeldTensor]) -> Iterator[HeldTensor]:
    """Tensors with the units in which zero(3) would gather them."""
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    units = wrap_modules(model, trained)
    unit_of = {names[id(p)]: number for number, unit in enumerate(units) for p in unit.params}
    for tensor in held:
        yield tensor._replace(unit=unit_of.get(tensor.name, 0))


def expert_parameters(model: nn.Module) -> dict[str, frozenset[str]]:
    """Names of the parameters of experts, by the module that gets their tokens."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        mixture.name: frozenset(names[id(p)] for p in mixture.parameters)
        for mixture in mixtures_of(model)
    }


def split_limits(model: nn.Module) -> SplitLimits:
    """How far Shoal can split the model: the sizes of tp that have a plan, and experts."""
    sizes = tuple(size for size in TP_SIZES if tp_roles(model, size))
    experts = math.gcd(*(mixture.num_experts for mixture in mixtures_of(model)))
    return SplitLimits(tp_sizes=sizes, ep=max(1, experts))


def precision_for(model: nn.Module, optimizer: OptimizerFactory, precision: str) -> Precision:
    """Bytes of each number, as Shoal trains: parameters keep their type under autocast."""
    sizes = sizes_of(model, optimizer)
    numbers = max(1, sum(p.numel() for p in sizes.flat.params))
    state = round(sum(sizes.state.values()) / numbers)
    own = precision_of(model, state)
    compute = precision if precision in ("bf16", "fp16") else own.compute
    return Precision(compute, own.parameter_bytes, own.gradient_bytes, 0, state)


def tp_roles(model: nn.Module, ranks: int = 2) -> dict[str, str]:
    """How tp would split the modules of a model, by name, as `trace_module` takes it."""
    try:
        found = plan_of(model, Tp(ranks))
    except ShoalError:
        return {}
    named = {name: _kind(role) for name, role in found.items()}
    return {name: kind for name, kind in named.items() if kind is not None}


def _kind(role: Role) -> str | None:
    if role.kind == "column":
        return "gathered" if role.output == "full" else "column"
    return "row" if role.kind == "row" else _KINDS.get(role.kind)


def trace_workload(
    config: WorkloadTraceConfig, train: Callable[[Job], Any], make: Callable[[type[Job]], Job]
) -> bool:
    """Whether this run only traces the first step; it is then done."""
    if config.folder is None:
        return False
    first_step(WorkloadJob, train, make, as_strategy("single")).write(config.folder)
    return True
