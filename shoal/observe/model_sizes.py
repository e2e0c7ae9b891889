"""The sizes of a model's tensors, found without allocating them: on meta, and as fake tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from shoal.plan.tracing.module import AUTOCAST, on_fake_tensors
from shoal.plan.tracing.recorder import SavedTensors
from shoal.plan.workloads import StoredRows
from shoal.replica.flat_params import FlatLayout
from shoal.replica.fsdp.unit_gather import cast_params, wrap_modules
from shoal.replica.microbatch_context import Loss, call_model, fork_rng
from shoal.replica.optimizers import PARAM_KEYS, like
from shoal.replica.pipeline.stages import Stages
from shoal.runtime.pytree import Tree, map_tensors
from shoal.schedules.steps.tensor_layout import TensorLayout
from shoal.schedules.steps.worker_model import WorkerModel
from shoal.sync.optimizer_step import OptimizerFactory, make_optimizer
from shoal.sync.shared_host import takes_slices
from shoal.train.data.rows import num_rows
from shoal.train.step.cut_batch import ForwardSignature


def sizes_of(
    model: nn.Module, optimizer: OptimizerFactory, names: Iterable[str] | None = None
) -> WorkerModel:
    """The sizes of a model, or of its parameters and buffers with these names."""
    params = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    kept = set(params) | set(buffers) if names is None else set(names)
    named = [(name, p) for name, p in params.items() if name in kept]
    trained = [p for _, p in named if p.requires_grad and p.numel()]
    ids = {id(p) for p in trained}
    name_of = {p: name for name, p in named}
    untrained: list[Tensor] = [p for _, p in named if id(p) not in ids]
    untrained += [b for name, b in buffers.items() if name in kept]
    meta = [
        (name, nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
        for name, p in named
    ]
    flat = FlatLayout(meta)
    index = {name: i for i, (name, _) in enumerate(flat.named)}
    wrapped = wrap_modules(model, trained)
    units = [[index[name_of[p]] for p in unit.params] for unit in wrapped]
    cast = frozenset(index[name_of[p]] for p in cast_params(wrapped))
    shapes = [(*p.shape, 2) if p.is_complex() else tuple(p.shape) for p in flat.params]
    made = make_optimizer(optimizer, flat.named)
    first_state, state = state_bytes(flat.named, made)
    return WorkerModel(
        TensorLayout(shapes, units, flat.width, cast),
        state=[state[name] for name in index],
        first_state=[first_state[name] for name in index],
        parameter_bytes=flat.width,
        names=list(index),
        untrained=sum(t.nbytes for t in untrained),
        takes_slices=takes_slices(made),
        statistics=[
            b.nbytes
            for name, b in buffers.items()
            if name in kept and name.endswith(("running_mean", "running_var"))
        ],
    )


def row_tables(model: nn.Module, optimizer: OptimizerFactory) -> dict[nn.Module, StoredRows]:
    """Of each `shoal.Embedding`, whose rows take memory where they are stored."""
    if not any(getattr(module, "has_rows", False) for module in model.modules()):
        return {}
    from shoal.server.embedding.module import embeddings_of
    from shoal.server.embedding.spec import RowOptimizer

    found: dict[nn.Module, StoredRows] = {}
    for _, one in embeddings_of(model):
        chosen = one.spec.optimizer if one.has_own_optimizer else RowOptimizer.of(optimizer)
        states = 0 if chosen is None else len(chosen.initial_state())
        width = _ROW_WIDTH * one.dim
        found[one] = StoredRows(one.num_rows, width, width * states)
    return found


_ROW_WIDTH = 4  # bytes of a number: rows are fp32


def state_bytes(
    named: list[tuple[str, nn.Parameter]], made: torch.optim.Optimizer
) -> tuple[dict[str, int], dict[str, int]]:
    """What an optimizer keeps for each parameter before and after its first step."""
    before = {name: _held(made, p) for name, p in named}
    for _, p in named:
        p.grad = torch.zeros_like(p)
    made.step()
    for _, p in named:
        p.grad = None
    return before, {name: _held(made, p) for name, p in named}


def _held(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> int:
    entries = optimizer.state[p].values() if p in optimizer.state else ()
    return sum(t.nbytes for t in entries if isinstance(t, Tensor))


def activation_bytes(
    model: nn.Module, loss: Loss, micro: Any, precision: str, stages: Stages | None = None
) -> list[int]:
    """What autograd saves of a micro-batch in each virtual stage; parameters do not count."""
    dtype = AUTOCAST.get(precision)
    with (
        on_fake_tensors(model, micro) as (known, content),
        fork_rng(torch.device("cpu")),
        torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None),
    ):
        inputs, targets = ForwardSignature(model).arguments(content, num_rows(content))
        forwards = _forwards(model, stages, inputs)
        return list(_saved_by(forwards, inputs, lambda y: loss(y, targets), known))


def _forwards(model: nn.Module, stages: Stages | None, inputs: Tree) -> list[Callable[[Any], Any]]:
    """What each virtual stage makes of what the one before it gives."""
    if stages is None:
        return [lambda values: call_model(model, values)]
    names, values = stages.bind_inputs(inputs)
    first, *others = (
        partial(stages.compute, virtual, names) for virtual in range(stages.virtual_stages)
    )
    return [lambda _: first(values), *others]


def _saved_by(
    forwards: Sequence[Callable[[Any], Any]],
    values: Tree,
    loss: Callable[[Any], Any],
    known: Collection[Tensor],
) -> Iterator[int]:
    for number, forward in enumerate(forwards):
        saved = SavedTensors(known)
        with saved_tensors_hooks(saved.note, lambda tensor: tensor):
            values = forward(values)
            if number == len(forwards) - 1:
                loss(values)
        yield saved.total
        values = map_tensors(  # the next stage gets tensors of its own
            lambda t: t.detach().clone().requires_grad_(t.requires_grad), values
        )


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules that are made inside the block have their parameters on the meta device."""

    def on_meta(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
        if param.is_meta:
            return param
        return nn.Parameter(param.to("meta"), param.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        with _MadeOnMeta():
            yield
    finally:
        hook.remove()


class _MadeOnMeta(TorchFunctionMode):
    """`torch.empty` of a module of torch takes no memory, unless it was told a device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_module = func is torch.empty and caller.startswith("torch.nn.modules.")
        if is_module and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def loop_sizes(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[WorkerModel]:
    """Of every model that an optimizer trains, once for each of them."""
    sizes = []
    for optimizer in optimizers:
        for model in models:
            if not isinstance(optimizer, torch.optim.Optimizer):
                sizes.append(sizes_of(model, optimizer))
                continue
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained = {n for n, p in model.named_parameters() if id(p) in mine and p.requires_grad}
            if trained:
                sizes.append(sizes_of(model, _factory(optimizer, model), trained))
    return sizes


def other_bytes(models: Sequence[nn.Module], sizes: Sequence[WorkerModel]) -> int:
    """Of the parameters and buffers that no optimizer trains."""
    tensors = {id(t): t for m in models for t in [*m.parameters(), *m.buffers()]}
    known = sum(int(size.layout.trained * size.width + size.untrained) for size in sizes)
    return max(0, sum(t.nbytes for t in tensors.values()) - known)


def _factory(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerFactory:
    """Makes one like `optimizer` for parameters that stand for those of the model, by name."""
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    of_model = dict(model.named_parameters())

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        params: dict[int, list[nn.Parameter]] = {}
        for name, p in named:
            params.setdefault(group_of[id(of_model[name])], []).append(p)
        groups = [
            {**{k: v for k, v in group.items() if k not in PARAM_KEYS}, "params": params[i]}
            for i, group in enumerate(optimizer.param_groups)
            if i in params
        ]
        made: torch.optim.Optimizer = like(optimizer, groups)
        return made

    return make
