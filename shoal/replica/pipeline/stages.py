"""A model split into stages: what each computes, and which tensors it holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from shoal.errors import BadInput
from shoal.replica.compiled import Compiler
from shoal.replica.context.sequence_shard import SequenceContext, shard_inputs, unpack
from shoal.replica.deferred_init import TensorSlot, tensor_slots
from shoal.replica.microbatch_context import call_arguments, preserve_modes
from shoal.replica.pipeline.balance import MUCH_CHEAPER
from shoal.replica.pipeline.faithful_trace import Untraceable
from shoal.replica.pipeline.graph_split import GraphSplit, optional_calls, required_arguments
from shoal.replica.pipeline.replay_split import ModuleSplit
from shoal.replica.split.attributes import Slot, hide
from shoal.replica.split.sharded_tensor import pack
from shoal.replica.tensor import activations
from shoal.replica.tensor.parallelize import TensorSplit
from shoal.runtime.pytree import Tree
from shoal.schedules.pipelines import locate


class Stages:
    """The split of a model into `stages * chunks` virtual stages.

    Every rank makes it from the full model, and all come to the same split. A parameter that
    several stages use (an embedding that is also the head) has several holders. `keep` then
    releases what other stages hold: those tensors become shapes without memory.
    """

    tensor: TensorSplit | None = None
    context: SequenceContext | None = None  # where workers have other positions of sequences

    def __init__(
        self,
        model: nn.Module,
        stages: int,
        chunks: int = 1,
        cuts: Sequence[str] | None = None,
        seconds: Mapping[str, float] | None = None,
    ):
        """`seconds` are those of the modules' forward, where they were measured."""
        self.model = model
        self.stages = stages
        self.chunks = chunks
        self.virtual_stages = stages * chunks
        self._required = required_arguments(model)
        self._signature = inspect.signature(model.forward)
        self._compiler: Compiler | None = None
        self._segments: dict[tuple[Any, ...], Callable[..., Tree]] = {}
        self._split = split_model(model, self.virtual_stages, cuts, seconds)
        self.cuts = self._split.cuts
        # whether every stage runs the forward from its start, with the same random numbers
        self.replays = isinstance(self._split, ModuleSplit)
        # every name of a tensor, and the first name of that same tensor
        first: dict[int, str] = {}
        slots = tensor_slots(model)
        self.aliases = {s.name: first.setdefault(id(s.tensor), s.name) for s in slots}
        self.holders = self._find_holders()

    def segment(self, virtual: int, given: tuple[str, ...] | None = None) -> Callable[..., Tree]:
        """What one virtual stage computes, for batches with these inputs, as training is now."""
        given = self._required if given is None else given
        key = (virtual, given, self.model.training)
        if key not in self._segments:
            segment = self._split.segment(virtual, given)
            if self._compiler is not None and isinstance(segment, nn.Module):
                segment.forward = self._compiler(segment.forward)
            self._segments[key] = segment
        return self._segments[key]

    def compile(self, compiler: Compiler) -> None:
        """Compile what stages compute from now on: a traced forward, or each unit by itself."""
        self._compiler = compiler
        self._segments.clear()
        if isinstance(self._split, ModuleSplit):
            self._split.compile(compiler)

    def split_tensors(self, tensor: TensorSplit) -> None:
        """Its layers have replaced those of the model; activations travel in another form."""
        self.tensor = tensor
        if isinstance(self._split, ModuleSplit):
            self._split.follow_replacements()

    def compute(self, virtual: int, inputs: Tree, values: tuple[Any, ...]) -> Tree:
        """What a virtual stage makes of the values that it receives; `inputs` are the batch's."""
        given, arguments = self.bind_inputs(inputs)
        segment = self.segment(virtual, given)
        arguments = self._sharded(arguments)
        if not virtual:
            values = self._sharded(values)
        elif self.tensor is not None:  # what came from the same worker of another stage
            values = activations.unpack(values, self.tensor.group, self.tensor.rng)
        if virtual and self.context is not None:
            values = unpack(values, self.context)
        if isinstance(self._split, GraphSplit):
            outputs = self._split.compute(segment, values)
        else:
            outputs = segment(arguments, *(values if virtual else ()))
        if virtual == self.virtual_stages - 1:
            return outputs
        return pack(outputs)

    def _sharded(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of the model with this worker's positions of sequences."""
        return arguments if self.context is None else tuple(shard_inputs(arguments, self.context))

    def bind_inputs(self, inputs: Tree) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The names of the arguments that a batch gives, and what the first stage takes."""
        args, kwargs = call_arguments(inputs)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadInput(f"the model cannot be called with this batch: {error}") from error
        return tuple(bound.arguments), tuple(bound.arguments.values())

    def usage(self) -> list[Any]:
        """What the virtual stages of this rank have used of others, as far as it is not learned."""
        return self._split.usage() if isinstance(self._split, ModuleSplit) else []

    def learn(self, usage: Sequence[Any], kept: Sequence[Sequence[Slot]]) -> None:
        """Send what the other stages use, by the usage of all ranks.

        A traced forward that uses what its modules set is refused; `kept` is by stage.
        """
        if isinstance(self._split, ModuleSplit):
            self._split.learn(usage)
        else:
            for stage, slots in enumerate(kept):
                self._split.check_constants(slots, stage)

    def hide_kept(self, kept: Sequence[Sequence[Slot]], here: int) -> None:
        """What modules of other stages set must not be used here."""
        for stage, slots in enumerate(kept):
            hide(self.model, [slot for slot in slots if slot not in kept[here]], stage)

    def keep(
        self, stage: int, filled: Iterable[list[TensorSlot]] | None = None
    ) -> list[tuple[str, nn.Parameter]]:
        """Release tensors that `stage` does not use, as they are `filled`; returns the others."""
        named = [(n, p) for n, p in self.model.named_parameters() if stage in self.holders[n]]
        if not any(p.requires_grad and p.numel() for _, p in named):
            raise BadInput(
                f"stage {stage} has no parameter to train: choose other cuts than "
                f"{list(self.cuts)}, or fewer stages"
            )
        kept = {name for name, holders in self.holders.items() if stage in holders}
        for slots in [[*tensor_slots(self.model)]] if filled is None else filled:
            for slot in slots:
                if self.aliases[slot.name] not in kept:
                    replace_by_shape(slot.module, slot.key)
        self._segments.clear()
        return named

    def _find_holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that use each tensor, training or evaluating; stage 0 for unused tensors."""
        names = {id(slot.tensor): self.aliases[slot.name] for slot in tensor_slots(self.model)}
        users: dict[str, set[int]] = {name: set() for name in names.values()}
        with preserve_modes(self.model):
            for training in (True, False):
                self.model.train(training)
                for virtual in range(self.virtual_stages):
                    stage = locate(self.stages, virtual).stage
                    for tensor in self._split.tensors_of(virtual):
                        if id(tensor) in names:
                            users[names[id(tensor)]].add(stage)
        return {name: tuple(sorted(stages)) or (0,) for name, stages in users.items()}


def split_model(
    model: nn.Module,
    virtual_stages: int,
    cuts: Sequence[str] | None,
    seconds: Mapping[str, float] | None,
) -> GraphSplit | ModuleSplit:
    """By its traced forward; or between its modules where it cannot be traced.

    It is split between modules, too, where that is much better balanced: inside of
    nn.TransformerEncoder, for example.
    """
    graph: GraphSplit | None = None
    try:
        graph = GraphSplit(model, virtual_stages, cuts, seconds)
        with preserve_modes(model):
            for training in (True, False):
                model.train(training)
                for given in (required_arguments(model), *optional_calls(model)):
                    graph.segment(0, given)
    except Untraceable:
        return ModuleSplit(model, virtual_stages, cuts, seconds)
    except BadInput as error:
        graph = None
        refusal = error
    if cuts is None:
        with suppress(BadInput):
            modules = ModuleSplit(model, virtual_stages, None, seconds)
            if graph is None or modules.cost < MUCH_CHEAPER * graph.cost:
                return modules
    if graph is None:
        raise refusal
    return graph


def replace_by_shape(module: nn.Module, key: str) -> None:
    """Let a tensor that another worker has be a shape without memory."""
    parameter = module._parameters.get(key)
    if parameter is not None:
        shape = torch.empty_like(parameter, device="meta")
        module._parameters[key] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    else:
        buffer = module._buffers[key]
        assert buffer is not None
        module._buffers[key] = torch.empty_like(buffer, device="meta")
