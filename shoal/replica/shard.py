"""What one worker has of a replica: all of it, a stage, slices of its tensors, or both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.comm.objects import PytreeChannel, all_equal
from shoal.errors import BadInput
from shoal.pytree import Tree, map_tensors, tensors_of
from shoal.replica.deferred_init import Blank, Place
from shoal.replica.engine import Engine, Loss, MicroBatch, arguments_of, keeping_modes
from shoal.replica.flat_params import FlatParams
from shoal.replica.grad_norm import NormOverParts
from shoal.replica.pipeline.engine import PipelineEngine
from shoal.replica.pipeline.profile import as_tensor, by_name, module_seconds
from shoal.replica.pipeline.stages import Stages, named_tensors
from shoal.replica.pipeline.tied_weights import Ties
from shoal.replica.tensor.parallelize import TensorSplit
from shoal.replica.tensor.plan import plan_of
from shoal.replica.tensor.sharded_tensor import whole_tensors
from shoal.schedules.pipelines.actions import accumulate
from shoal.schedules.pipelines.catalog import build
from shoal.strategy.strategy import Strategy
from shoal.strategy.terms import Pp

LARGEST_CHECKED_BYTES = 1 << 30


class Part:
    """A whole replica. All layers are here, and where there is tp, slices of their parameters."""

    tensor: TensorSplit | None = None

    def __init__(self, model: nn.Module):
        self.model = model
        self.named = list(model.named_parameters())

    @property
    def computes(self) -> nn.Module | None:
        """What computes here, where that is not the model itself."""
        return None

    def engine(self, loss: Loss, flat: FlatParams, microbatches: int, **options: Any) -> Engine:
        return Engine(self.model, loss, flat, accumulate(1, 0, microbatches), **options)

    def split(self, tensor: TensorSplit) -> None:
        self.tensor = tensor

    def total_norm(self, shards: Group | None) -> NormOverParts | None:
        """What knows the norm of the whole gradient, where this worker has a part of it.

        `shards` are the replicas that share it out among them, if they do.
        """
        if self.tensor is None:
            return None
        places = {p: place for place, (_, p) in enumerate(self.named)}
        return NormOverParts(places, len(places), lambda p: True, shards=shards, tensor=self.tensor)

    def join(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, by name, from the slices of the workers of tp, which all call it."""
        return tensors if self.tensor is None else self.tensor.join(tensors)

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """This worker's slices of whole tensors."""
        return tensors if self.tensor is None else self.tensor.take(tensors)

    def even_out(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        """Make equal what several workers of the replica have of the same parameter.

        Where gradients are compressed, what arrives also depends on the neighbours in a bucket.
        """
        if self.tensor is not None:
            self.tensor.even_out(tensors)

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether `even_out` replaces what is here by what another worker has."""
        return self.tensor is not None and self.tensor.is_copy(parameter)

    def share(self, loss: Tensor) -> Tensor:
        """The loss, on every worker of the replica."""
        return loss

    def check(self, microbatches: Sequence[MicroBatch], engine: Engine) -> None:
        """Raise `BadInput` unless the parts together compute what the model does."""

    def collect(self, tree: Tree) -> list[Tree]:
        """What the workers of the replica give, at the first of them; there alone it is whole."""
        return [tree]


class StagePart(Part):
    """One stage of a pipeline; the model's other tensors are shapes without memory."""

    def __init__(
        self,
        model: nn.Module,
        pp: Pp,
        mesh: Mesh,
        device: torch.device,
        blank: Blank,
        example: Tree = None,
    ):
        self.model = model
        self.pp = pp
        self.group = mesh.pp
        self._is_trusted = bool(blank)  # with all tensors on one worker it may not fit
        group = mesh.pp
        self.chunks = build(pp.schedule, group.size, 1, pp.chunks).chunks
        seconds = None
        if pp.balance == "measured" and pp.cuts is None:
            seconds = _measured(model, example, pp, mesh.world, device, bool(blank))
        self.stages = Stages(model, group.size, self.chunks, pp.cuts, seconds)
        self._agree(device)
        self.places = {p: place for place, p in enumerate(model.parameters())}
        start = _from_rank_0(blank.fill_in_turn(model, device), mesh.world)
        self.named = self.stages.keep(group.rank, start)
        self.channel = PytreeChannel(group, device)
        self.ties = Ties(self.named, self.stages.holders, self.channel)
        self.num_parameters = len(self.places)
        self.places = {p: self.places[p] for _, p in self.named}

    def split(self, tensor: TensorSplit) -> None:
        self.tensor = self.stages.tensor = tensor

    def total_norm(self, shards: Group | None) -> NormOverParts | None:
        return NormOverParts(
            *(self.places, self.num_parameters, self.ties.is_counted_here),
            shards=shards,
            tensor=self.tensor,
            stages=self.group,
        )

    @property
    def computes(self) -> nn.Module | None:
        first = self.group.rank
        step = self.group.size
        own = range(first, self.stages.parts, step)
        segments = [self.stages.segment(virtual) for virtual in own]
        modules = [segment for segment in segments if isinstance(segment, nn.Module)]
        return nn.ModuleList(modules) if len(modules) == len(segments) else self.model

    def engine(self, loss: Loss, flat: FlatParams, microbatches: int, **options: Any) -> Engine:
        pipeline = build(self.pp.schedule, self.group.size, microbatches, self.pp.chunks)
        return PipelineEngine(
            *(self.stages, pipeline, self.channel, self.ties, loss, flat),
            recompute=self.pp.recompute,
            **options,
        )

    def even_out(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        self.ties.even_out(tensors)
        super().even_out(tensors)

    def is_copy(self, parameter: nn.Parameter) -> bool:
        return not self.ties.is_counted_here(parameter) or super().is_copy(parameter)

    def share(self, loss: Tensor) -> Tensor:
        number = loss.double()
        self.group.broadcast(number, root=self.group.size - 1).wait()
        return number.to(loss.dtype)

    @torch.no_grad()
    def check(self, microbatches: Sequence[MicroBatch], engine: Engine) -> None:
        """The first stage runs the model itself, once, with everybody's tensors, and compares.

        A model that is too large for that, or was built on the meta device, is trusted.
        """
        size = sum(t.nbytes for t in self.model.state_dict().values())
        if self._is_trusted or size > LARGEST_CHECKED_BYTES:
            return
        inputs = microbatches[0].inputs
        same = torch.ones(1, device=engine.flat.device)
        with engine.flat.assembled(), keeping_modes(self.model):
            mine = {n: t for n, t in named_tensors(self.model) if t.device.type != "meta"}
            self.model.eval()
            split = engine.share(tensors_of(whole_tensors(engine.predict(inputs))))
            tensors = {n: t for part in reversed(self.collect(mine)) for n, t in part.items()}
            if self.group.rank == 0:
                whole = functional_call(self.model, tensors, *arguments_of(inputs))
                same.fill_(_alike(tensors_of(whole_tensors(whole)), split))
        self.group.broadcast(same).wait()
        if not same:
            raise BadInput(
                f"the stages of {type(self.model).__name__}, cut at {', '.join(self.stages.cuts)}, "
                "do not compute what the model does: its forward uses more than its inputs and "
                "modules; put what is special about it into a module of its own"
            )

    def collect(self, tree: Tree) -> list[Tree]:
        if self.group.rank != 0:
            self.channel.send(tree, 0, 0).wait()
            return [tree]
        return [tree, *(self.channel.recv(stage, 0) for stage in range(1, self.group.size))]

    def _agree(self, device: torch.device) -> None:
        """All stages must have cut the same model at the same places."""
        said = repr((self.stages.cuts, sorted(self.stages.holders.items())))
        if not all_equal(self.group, said.encode(), device):
            raise BadInput(
                f"rank {self.group.rank} and another stage have built different models: every "
                "worker has to build the same one, with the same layers"
            )


def part_of_replica(
    model: nn.Module,
    strategy: Strategy,
    mesh: Mesh,
    device: torch.device,
    blank: Blank,
    example: Tree = None,
) -> Part:
    """This worker's part of the model, which all have built; `example` are inputs of a batch.

    Stages are cut, and the layers that are split chosen, while the model is whole. What is
    `blank` is filled layer by layer, and what belongs to others let go.
    """
    tp = strategy.tp
    pp = strategy.pp
    roles = plan_of(model, tp) if tp is not None and mesh.tp.size > 1 else {}
    if pp is not None and mesh.pp.size > 1:
        part: Part = StagePart(model, pp, mesh, device, blank, example)
        start = blank.fill_in_turn(model, device)
    else:
        part = Part(model)
        start = _from_rank_0(blank.fill_in_turn(model, device), mesh.world)
    if roles:
        part.split(
            TensorSplit(model, roles, mesh.tp, device, start, tp is not None and tp.sequence)
        )
    return part


def _measured(
    model: nn.Module, example: Tree, pp: Pp, world: Group, device: torch.device, is_blank: bool
) -> dict[str, float]:
    """The seconds of modules as rank 0 has measured them, so that all cut alike."""
    if is_blank:
        raise BadInput(f"{pp} measures the model, which has no memory yet: leave balance out")
    if example is None:
        raise BadInput(
            f"{pp} measures the model: give job.step(…, example=inputs) the inputs of a batch"
        )
    found = as_tensor(model, {})
    if world.rank == 0:
        inputs = map_tensors(lambda t: t.to(device), example)
        found = as_tensor(model, module_seconds(model, inputs, device))
    found = found.to(device)
    world.broadcast(found).wait()
    return by_name(model, found)


def _from_rank_0(filled: Iterator[list[Place]], world: Group) -> Iterator[list[Place]]:
    """Tensors as they are filled, with the values that rank 0 has."""
    for found in filled:
        tensor = found[0].tensor
        if tensor.numel() and tensor.device.type != "meta":
            whole = tensor.detach().contiguous()
            world.broadcast(whole).wait()
            tensor.data.copy_(whole)
        yield found


def _alike(whole: list[Tensor], split: list[Tensor]) -> bool:
    """Equal but for rounding, which here is that of the same operations on the same numbers."""
    if [t.shape for t in whole] != [t.shape for t in split]:
        return False
    for a, b in zip(whole, split, strict=True):
        a = a.double()
        b = b.double()
        size = float(a.abs().max()) if a.numel() else 0.0
        if not torch.allclose(a, b, rtol=0.0, atol=1e-3 * size, equal_nan=True):
            return False
    return True
