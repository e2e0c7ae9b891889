"""How much memory a worker will need, before anything is allocated.

`shoal memory` runs the script in one process and asks for it (`RunConfig.memory_estimate`).
Parameters then go to the meta device as modules are made. The first call of a step runs one
worker's micro-batch through the model on fake tensors, which have shapes and no memory, and adds
up what autograd saves. The optimizer takes a step on the meta device, which shows its state. The
step of the strategy says the rest (`schedules/steps/`). A second call ends the script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.comm.call import Call
from shoal.comm.executors.solo import Solo
from shoal.comm.group import Group
from shoal.comm.transport.transport import DoneWork, Work
from shoal.errors import BadInput, NotBuilt, StopTraining
from shoal.observe import model_sizes
from shoal.replica.deferred_init import DeferredInit
from shoal.replica.expert.mixtures import Mixture, mixtures_for
from shoal.replica.expert.split import expert_summary, keep_first_experts
from shoal.replica.loss import BoundLoss, LossFunction
from shoal.replica.microbatch_context import Loss
from shoal.replica.pipeline.stages import Stages
from shoal.replica.split.build_shard import roles_of
from shoal.replica.tensor.parallelize import TensorSplit
from shoal.runtime.config import MemoryEstimateConfig
from shoal.schedules.pipelines import ActionKind
from shoal.schedules.pipelines.catalog import build
from shoal.schedules.steps.catalog import step_of
from shoal.schedules.steps.step import What
from shoal.schedules.steps.worker_model import WorkerModel
from shoal.strategy.base import Batches, SyncTerm
from shoal.strategy.split_terms import Pp, Tp
from shoal.strategy.strategy import Strategy, as_strategy
from shoal.sync.optimizer_step import OptimizerFactory
from shoal.train.data.rows import num_rows, take_rows
from shoal.train.job import Job
from shoal.train.own_loop.setup import loop_term, tensor_plans
from shoal.train.step.options import StepOptions


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that one worker takes of its device at its fullest, each of one kind (`What`)."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    copies: int = 0
    residuals: int = 0
    in_flight: int = 0
    shared: int = 0
    server: int = 0
    host: int = 0  # of its host's memory, all kinds together
    activations: int | None = None  # what backward needs of micro-batches under way; None: unknown

    def plus(self, other: WorkerMemory) -> WorkerMemory:
        """Of two models that are trained in turn: activations are not held at once."""
        known = [m.activations for m in (self, other) if m.activations is not None]
        kinds = [*(what.value for what in What), "host"]
        sums = {kind: getattr(self, kind) + getattr(other, kind) for kind in kinds}
        return WorkerMemory(**sums, activations=max(known) if len(known) == 2 else None)


def memory_of(
    strategy: Strategy,
    workers: int,
    stages: Sequence[WorkerModel],
    activations: Sequence[int | None],
) -> list[WorkerMemory]:
    """What each worker holds; `stages` are the sizes of each stage of a replica.

    Workers that have other tokens (ep, cp) divide the activations; `stages` have the experts and
    the slices of layers (tp) of one worker.
    """
    layout = strategy.layout(workers)
    term = strategy.sync_for(layout.replicas)
    of_stage = layout.ep * layout.cp
    found: list[WorkerMemory] = []
    for replica in range(layout.replicas):
        for sizes, held in zip(stages, activations, strict=True):
            step = step_of(term, sizes, layout.replicas, replica)
            memory = {what.value: round(step.bytes_of(what)) for what in What}
            saved = None if held is None else math.ceil(held / of_stage)
            worker = WorkerMemory(**memory, host=round(step.host_bytes), activations=saved)
            found += [worker] * of_stage * layout.tp
    return found


def servers_of(strategy: Strategy, workers: int, stages: Sequence[WorkerModel]) -> list[int]:
    """Bytes of each server process, where there are some; each has a part of every stage."""
    layout = strategy.layout(workers)
    term = strategy.sync_for(layout.replicas)
    held = [step_of(term, sizes, layout.replicas, 0).servers for sizes in stages]
    return [layout.tp * round(sum(shares)) for shares in zip(*held, strict=True)]


def stage_sizes(
    model: nn.Module, optimizer: OptimizerFactory, stages: Stages | None
) -> list[WorkerModel]:
    """The sizes of each stage, with the parameters that it will hold."""
    if stages is None:
        return [model_sizes.sizes_of(model, optimizer)]
    sizes = []
    for stage in range(stages.stages):
        held = {name: holders for name, holders in stages.holders.items() if stage in holders}
        of_stage = model_sizes.sizes_of(model, optimizer, list(held))
        duplicates = frozenset(
            i for i, name in enumerate(of_stage.names) if stage > min(held[name])
        )
        sizes.append(replace(of_stage, is_stage=True, duplicates=duplicates))
    return sizes


def split_model(model: nn.Module, pp: Pp | None) -> Stages | None:
    """The stages of a pipeline, as workers will find them; None without one."""
    if pp is None or pp.size == 1:
        return None
    return Stages(model, pp.size, build(pp.schedule, pp.size, 1, pp.chunks).chunks, pp.cuts)


class Absent(Solo):
    """Rank 0 of a group whose other ranks are not there: nothing arrives."""

    def __init__(self, size: int):
        self.size = size

    def submit(self, call: Call) -> Work:
        return DoneWork()


def split_layers(model: nn.Module, tp: Tp | None, mixtures: list[Mixture]) -> dict[str, str]:
    """Let the layers that tp splits be those of the first worker, as a run does; how, by name."""
    if tp is None or tp.size == 1:
        return {}
    roles = roles_of(model, tp, mixtures)
    meta = torch.device("meta")
    filled = DeferredInit(nn.Sequential()).fill_in_turn(model, meta)
    split = TensorSplit(model, roles, Group(Absent(tp.size)), meta, filled, tp.sequence)
    split.rng.active = False  # it would look at what it draws
    return {name: role.kind for name, role in roles.items()}


def held_layers(sizes: WorkerModel, term: SyncTerm, replicas: int) -> dict[str, Any]:
    """The layers of a stage, and those that each replica owns where its state is sharded."""

    def layers(names: list[str]) -> list[str]:
        return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))

    layout = sizes.layout
    owned = None
    if term.shards_state and replicas > 1:
        owned = [
            layers([sizes.names[one.tensor] for one in layout.overlaps(shard)])
            for shard in layout.shards(replicas)
        ]
    found = {"layers": layers(list(sizes.names)), "owned": owned}
    return {**found, "numel": layout.trained, "width": sizes.width}


def stage_activations(virtual: Sequence[int], pp: Pp | None, microbatches: int) -> list[int]:
    """What each stage keeps, from what a micro-batch needs in each virtual stage.

    A stage keeps what it needs of every micro-batch between its forward and its backward. If it
    computes the forward again, it keeps that of one, and of the others only their inputs.
    """
    if pp is None or pp.size == 1:
        return list(virtual)
    pipeline = build(pp.schedule, pp.size, microbatches, pp.chunks)
    most = []
    for stage, actions in enumerate(pipeline.actions):
        chunks = virtual[stage :: pp.size]
        held = [0]
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                held.append(held[-1] + chunks[action.chunk])
            elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
                held.append(held[-1] - chunks[action.chunk])
        most.append(max(chunks) if pp.recompute else max(held))
    return most


# ------------------------------------------------------------------------------ the script's run


class EstimateJob(Job):
    """A job that looks at what it is given and trains nothing."""

    def prepare(self, strategy: Strategy, workers: int) -> None:
        self.checkpoints.dry = True
        self._strategy = strategy
        self._workers = workers
        self._estimates: list[list[WorkerMemory]] = []
        self._servers: list[list[int]] = []
        self._whys: list[str] = []
        self._is_own_loop = False
        self._held: list[dict[str, Any]] = []  # by stage
        self._roles: dict[str, str] = {}  # of layers that tp splits
        self._experts = ""  # where those of ep are
        self._rows = 0  # of a global batch

    def around_script(self) -> AbstractContextManager[None]:
        return model_sizes.parameters_without_memory()

    def step(self, model: nn.Module, loss: LossFunction | None = None, **options: Any) -> Any:
        optimizer = options.pop("optimizer")
        given = {k: v for k, v in options.items() if k in StepOptions.__dataclass_fields__}
        chosen = StepOptions(**given)
        called = False

        def first_call(batch: Any) -> Tensor:
            nonlocal called
            if called:
                raise StopTraining
            called = True
            self._estimate(model, BoundLoss(loss), optimizer, batch, chosen)
            return torch.zeros(())

        return first_call

    def setup(self, *objects: Any, **options: Any) -> Any:
        """Of a loop of the script's own; its activations cannot be known."""
        self._is_own_loop = True
        models = [o for o in objects if isinstance(o, nn.Module)]
        loop_term(replace(self._step_context(), strategy=self._strategy))
        strategy = self._strategy
        if strategy.sync is not None:
            strategy = replace(strategy, sync=strategy.sync.in_own_loop())
        for model, tp in zip(models, tensor_plans(models, strategy.tp), strict=True):
            split_layers(model, tp, [])
        sizes = model_sizes.loop_sizes(models, [o for o in objects if not isinstance(o, nn.Module)])
        self._estimates += [memory_of(strategy, self._workers, [s], [None]) for s in sizes]
        self._servers += [servers_of(strategy, self._workers, [s]) for s in sizes]
        others = WorkerMemory(model_sizes.other_bytes(models, sizes), activations=0)
        self._estimates.append([others] * self._workers)
        self._whys = ["the script computes the loss in a loop of its own"]
        return objects[0] if len(objects) == 1 else objects

    def batches(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if self._is_own_loop:
            raise StopTraining
        return super().batches(*args, **kwargs)

    def _stop(self, *args: Any, **kwargs: Any) -> Any:
        raise StopTraining

    backward = ema = evaluate = _stop

    def load(self, path: str | Path) -> dict[str, Any]:
        return {}

    def _estimate(
        self, model: nn.Module, loss: Loss, optimizer: Any, batch: Any, options: StepOptions
    ) -> None:
        pp = self._strategy.pp
        replicas = self._strategy.layout(self._workers).replicas
        batches = self._strategy.sync_for(replicas).batches
        options = options.with_pipeline(pp, model)
        microbatches = options.local_microbatches(replicas)
        rows_of = 1 if batches is Batches.IN_TURNS else replicas
        content = getattr(batch, "content", batch)
        total = self._rows = num_rows(content)
        largest = max(1, math.ceil(total / (rows_of * microbatches)))
        micro = take_rows(content, [range(largest)], total)
        split = split_model(model, pp)
        ep = self._strategy.ep
        mixtures = [] if ep is None else mixtures_for(model, ep)
        self._roles |= split_layers(model, self._strategy.tp, mixtures)
        activations: Sequence[int | None] = [None] * (split.stages if split else 1)
        try:
            virtual = model_sizes.activation_bytes(model, loss, micro, options.precision, split)
            activations = stage_activations(virtual, pp, microbatches)
        except Exception as error:  # whatever the user's model does with a fake tensor
            self._whys.append(first_line(error))
        if ep is not None:
            self._experts = expert_summary(model, mixtures, ep.size, ep.capacity)
            keep_first_experts(mixtures, ep.size)
        # under ep gradients are summed over its workers at the parameters
        accumulates = microbatches > 1 or ep is not None
        given: dict[str, Any] = {"accumulates": accumulates and not options.exact}
        given["is_cast"] = options.precision != "fp32" and not options.compile
        given["on_cpu"] = self._services.config.memory_estimate.on_cpu or None
        given["microbatches"] = microbatches
        given["exact_microbatches"] = options.microbatches if options.exact else None
        stages = [replace(sizes, **given) for sizes in stage_sizes(model, optimizer, split)]
        workers = memory_of(self._strategy, self._workers, stages, activations)
        servers = servers_of(self._strategy, self._workers, stages)
        self._add_rows(model, optimizer, workers, servers)
        self._estimates.append(workers)
        self._servers.append(servers)
        term = self._strategy.sync_for(replicas)
        self._held = [held_layers(sizes, term, replicas) for sizes in stages]

    def _add_rows(
        self,
        model: nn.Module,
        optimizer: Any,
        workers: list[WorkerMemory],
        servers: list[int],
    ) -> None:
        """Rows of `shoal.Embedding` lie on the servers, or in the only worker."""
        if not (tables := model_sizes.row_tables(model, optimizer).values()):
            return
        term: Any = self._strategy.sync_for(self._workers)
        if self._workers > 1 and (not term.has_servers or self._strategy.splits):
            raise NotBuilt("shoal.Embedding trains on several workers under ps, not otherwise")
        held = math.ceil(sum(table.bytes for table in tables))
        if servers:
            share = -(-held // term.servers)
            servers[:] = [taken + share for taken in servers]
            return
        holders = 1 if getattr(term, "placement", "") == "rank0" else self._workers
        kind = "server" if term.has_servers else "parameters"
        for rank in range(holders):
            taken = getattr(workers[rank], kind)
            workers[rank] = replace(workers[rank], **{kind: taken - -held // holders})

    def document(self) -> dict[str, Any] | None:
        """What was found; None where the script made no training step."""
        if not self._estimates:
            return None
        of_workers = zip(*self._estimates, strict=True)
        return {
            "workers": [asdict(reduce(WorkerMemory.plus, models)) for models in of_workers],
            "servers": [sum(parts) for parts in zip(*self._servers, strict=True)],
            "unknown": self._whys,
            "held": self._held,
            "roles": self._roles,
            "experts": self._experts,
            "batch": self._rows,
        }


def first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"


Looking = TypeVar("Looking", bound=EstimateJob)


def estimate_memory(
    config: MemoryEstimateConfig, train: Callable[[Job], Any], make: Callable[[type[Job]], Job]
) -> None:
    """Write what workers need under each strategy; one that cannot train ends no other."""
    assert config.folder is not None
    texts = config.strategy.splitlines()
    found: list[dict[str, Any] | None] = []
    for text in texts:
        try:
            job = first_step(EstimateJob, train, make, as_strategy(text), config.workers)
            found.append(job.document())
        except BadInput as error:
            if len(texts) == 1:
                raise
            found.append({"refused": str(error)})
    if None not in found:
        (config.folder / "estimate.json").write_text(json.dumps(found))


def first_step(
    kind: type[Looking],
    train: Callable[[Job], Any],
    make: Callable[[type[Job]], Job],
    strategy: Strategy,
    workers: int = 1,
    **fields: Any,
) -> Looking:
    """Run a script with a job that looks at its first step, on parameters without memory."""
    job = make(kind)
    assert isinstance(job, kind)
    job.prepare(strategy, workers)
    vars(job).update(fields)
    with suppress(StopTraining), job.around_script():
        train(job)
    return job
