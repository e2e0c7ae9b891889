"""Forwards of modules whose experts live on different workers, in the place of their own."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.group import Op
from shoal.errors import BadInput
from shoal.replica.context.sequence_shard import SequenceShard
from shoal.replica.expert.dispatch import Dispatch, ExpertPlacement, exchange
from shoal.replica.expert.mixtures import ListedMixture, StackedMixture, mixtures_of
from shoal.replica.microbatch_context import fork_rng
from shoal.replica.split.attributes import attributes_kept
from shoal.replica.split.sharded_tensor import NotAligned, full_tensors
from shoal.runtime.pytree import Tree, map_tensors, tensors_of


class _Call(NamedTuple):
    expert: int
    tokens: Tensor

    @property
    def rows(self) -> int:
        return self.tokens.shape[:-1].numel()


class ListedExperts:
    """Replaces the forward of a block that calls the experts of a list, and those of its experts.

        record    the forward runs once; a call of an expert notes its rows and returns zeros
        exchange  all rows travel at once to the workers of their experts, and the results back
        replay    the forward runs again; a call of an expert returns the results

    The block may call experts in any order, several times, or leave some out: ranks need not call
    the same ones. Random numbers, buffers and attributes are after the record what they were
    before.
    """

    def __init__(self, mixture: ListedMixture, placement: ExpertPlacement):
        self._names = list(mixture.experts)
        self._block = mixture.block
        self._placement = placement
        self._forward = mixture.block.forward
        self._compute = [expert.forward for expert in mixture.experts.values()]
        inside = {module for expert in mixture.experts.values() for module in expert.modules()}
        self._others = [module for module in mixture.block.modules() if module not in inside]
        self._calls: list[_Call] | None = None  # while recording
        self._results: Iterator[tuple[_Call, Tensor]] | None = None  # while replaying
        self._is_checked = False
        self._probed: dict[tuple[int, torch.dtype], Tensor] = {}  # in the forward that runs now
        for index, expert in enumerate(mixture.experts.values()):
            expert.forward = partial(self._call_expert, index)
        mixture.block.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        shards = [t for t in tensors_of((args, kwargs)) if isinstance(t, SequenceShard)]
        if not shards:
            return self._run(args, kwargs)
        first = shards[0]  # which tokens go to an expert is known for whole sequences
        first.context.tell_gathered(type(self._block).__name__)
        args, kwargs = full_tensors((args, kwargs))
        return map_tensors(partial(_shard_like, first), self._run(args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._probed.clear()
        calls = self._record(args, kwargs)
        self._results = iter(zip(calls, self._exchange(calls, (args, kwargs)), strict=True))
        try:
            out = self._forward(*args, **kwargs)
            if next(self._results, None) is not None:
                raise self._differs()
        finally:
            self._results = None
        self._is_checked = True
        return out

    # ------------------------------------------------------------------ calls of experts

    def _call_expert(self, expert: int, *args: Any, **kwargs: Any) -> Tensor:
        name = self._names[expert]
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 1:
            raise BadInput(
                f"{name} is called with more than one tensor: experts that ep places on other "
                "workers take one tensor of tokens"
            )
        call = _Call(expert, args[0])
        if self._calls is not None:
            self._calls.append(call)
            like = self._probe(call.tokens)
            return like.new_zeros(*call.tokens.shape[:-1], like.shape[-1])
        if self._results is None:
            raise BadInput(
                f"{name} is called outside the forward of {type(self._block).__name__}, which has "
                "the list of experts"
            )
        noted, result = next(self._results, (None, None))
        if noted is None or result is None or not self._is_same(noted, call):
            raise self._differs()
        return result

    def _is_same(self, noted: _Call, call: _Call) -> bool:
        if noted.expert != call.expert or noted.tokens.shape != call.tokens.shape:
            return False
        a = noted.tokens.detach()
        b = call.tokens.detach()
        return self._is_checked or torch.allclose(a, b, equal_nan=True)

    def _differs(self) -> BadInput:
        return BadInput(
            f"the tokens that {type(self._block).__name__} sends to its experts depend on what "
            "the experts return, so they cannot live on different workers: omit ep"
        )

    # ------------------------------------------------------------------ record and exchange

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Call]:
        self._calls = []
        # copies with their graph: a forward may change its inputs in place
        args, kwargs = map_tensors(
            lambda t: t.clone() if t.is_floating_point() else t, (args, kwargs)
        )
        devices = [t.device for t in tensors_of((args, kwargs))]
        device = devices[0] if devices else torch.device("cpu")
        try:
            with fork_rng(device), attributes_kept(self._others):
                self._forward(*args, **kwargs)
            return self._calls
        finally:
            self._calls = None

    def _exchange(self, calls: Sequence[_Call], inputs: Tree) -> list[Tensor]:
        """What the experts make of the tokens of each call."""
        tokens = self._rows(calls, inputs)
        device = tokens.device
        rows = [call.rows for call in calls]
        numbers = torch.tensor([call.expert for call in calls], dtype=torch.int64)
        called = torch.zeros(len(self._names), dtype=torch.bool)
        called[numbers] = True
        indices = numbers.repeat_interleave(torch.tensor(rows, dtype=torch.int64))
        dispatch = Dispatch(self._placement, indices.to(device), called.to(device))
        x = dispatch.to_experts(tokens.index_select(0, dispatch.order))
        results = dispatch.to_sources(self._local(x, dispatch))
        width = results.shape[-1]
        pieces = torch.split(results, rows)
        return [p.view(*c.tokens.shape[:-1], width) for c, p in zip(calls, pieces, strict=True)]

    def _rows(self, calls: Sequence[_Call], inputs: Tree) -> Tensor:
        """The tokens of all calls; without a call none, as wide as those of other ranks."""
        widths = {c.tokens.shape[-1] for c in calls}
        if len(widths) > 1:
            raise BadInput(f"{self._names[0]} and other experts take tokens of different widths")
        floats = [t for t in tensors_of(inputs) if t.is_floating_point()]
        like = calls[0].tokens if calls else floats[0]
        width = torch.tensor([max(widths, default=0)], device=like.device)
        self._placement.group.all_reduce(width, Op.MAX).wait()
        if not calls:
            return like.new_zeros(0, int(width))
        return torch.cat([c.tokens.reshape(-1, int(width)) for c in calls])

    def _local(self, x: Tensor, dispatch: Dispatch) -> Tensor:
        """Every expert here that a rank has called computes its rows, perhaps none."""
        pieces = torch.split(x, dispatch.counts)
        here = zip(self._placement.local, pieces, dispatch.was_called, strict=True)
        results = [self._compute[expert](piece) for expert, piece, called in here if called]
        if results:
            return torch.cat(results)
        like = self._probe(x)
        return like.new_zeros(0, like.shape[-1]) + x.sum() * 0

    @torch.no_grad()
    def _probe(self, tokens: Tensor) -> Tensor:
        """What an expert returns for a row: its width and type."""
        key = (tokens.shape[-1], tokens.dtype)
        if key not in self._probed:
            first = self._placement.local.start
            out = self._compute[first](tokens.new_zeros(1, tokens.shape[-1]))
            if not isinstance(out, Tensor) or out.shape[:-1] != (1,):
                raise BadInput(
                    f"{self._names[first]} does not return a row for each token, so ep cannot "
                    "place it on another worker"
                )
            self._probed[key] = out
        return self._probed[key]


def _shard_like(tokens: SequenceShard, out: Tensor) -> Tensor:
    """This rank's positions of a result that has a row for each token."""
    spec = tokens.spec
    if out.shape[:-1] != tokens.full_shape[:-1] or spec.dim >= out.dim() - 1:
        return out
    return tokens.context.wrap(spec.take_local(out, tokens.context.rank), spec)


def spread_stacked(mixture: StackedMixture, placement: ExpertPlacement) -> None:
    """Replaces the forward of the module: its own one computes what comes to this worker.

    A token travels once for each expert that it is routed to, with its router weight.
    """
    assert mixture.routed is not None
    names = mixture.routed
    compute = _module_call(mixture.module)

    def local(x: Tensor, experts: Tensor, weights: Tensor, is_dense: bool, others: Any) -> Tensor:
        """What the experts of this worker make of the rows that have come."""
        if len(x) == 0:  # a row of zeros gives the parameters a gradient of 0, as on one device
            row = x.new_zeros(1, x.shape[1]) + x.sum() * 0
            weight = weights.new_zeros(1, 1) + weights.sum() * 0
            return local(row, experts.new_zeros(1, 1), weight, is_dense, others)[:0]
        if is_dense:
            table = weights.new_zeros(len(x), len(placement.local))
            weights = table.scatter(1, experts, weights)
        given = {names.tokens: x, names.indices: experts, names.weights: weights, **others}
        return torch.reshape(compute(given), (len(x), -1))

    def forward(arguments: dict[str, Any]) -> Tensor:
        hidden: Tensor = arguments.pop(names.tokens)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        indices = arguments.pop(names.indices).reshape(len(tokens), -1)
        weights = arguments.pop(names.weights).reshape(len(tokens), -1)
        is_dense = weights.shape != indices.shape  # a weight for every expert
        weights = weights.gather(1, indices) if is_dense else weights
        dispatch = Dispatch(placement, indices.flatten())
        choices = indices.shape[1]
        x = dispatch.to_experts(tokens.index_select(0, dispatch.order // choices))
        w = dispatch.to_experts(weights.reshape(-1, 1).index_select(0, dispatch.order))
        experts = dispatch.local_experts[:, None]
        out = dispatch.to_sources(local(x, experts, w, is_dense, arguments))
        return out.view(len(tokens), choices, -1).sum(1).view(*hidden.shape[:-1], -1)

    _set_num_experts(mixture, len(placement.local))
    _replace_forward(mixture, forward)


def compute_positions_here(model: nn.Module) -> None:
    """Let stacked experts that are complete compute the tokens of the positions that are here."""
    for mixture in mixtures_of(model):
        if isinstance(mixture, StackedMixture) and mixture.routed is not None:
            _replace_forward(mixture, _module_call(mixture.module))


ByName = Callable[[dict[str, Any]], Tensor]  # of the arguments of a forward


def _module_call(module: nn.Module) -> ByName:
    """The present forward of a module."""
    forward = module.forward
    signature = inspect.signature(forward)

    def compute(arguments: dict[str, Any]) -> Tensor:
        call = inspect.BoundArguments(signature, OrderedDict(arguments))
        out: Tensor = forward(*call.args, **call.kwargs)
        return out

    return compute


def _replace_forward(mixture: StackedMixture, compute: ByName) -> None:
    """Where tokens are those of some positions, what comes with them is of the same ones."""
    signature = inspect.signature(mixture.module.forward)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        assert mixture.routed is not None
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        tokens = arguments[mixture.routed.tokens]
        if not isinstance(tokens, SequenceShard):
            return compute(arguments)
        local = map_tensors(partial(_at_positions_of, tokens), arguments)
        return tokens.context.wrap(compute(local), tokens.spec)

    mixture.module.forward = forward


def _at_positions_of(tokens: SequenceShard, tensor: Tensor) -> Tensor:
    """The rows of a tensor that belong to the same positions as `tokens`."""
    try:
        return tokens.context.local_part(tensor, tokens.spec)
    except NotAligned:
        return tensor.full() if isinstance(tensor, SequenceShard) else tensor


def _set_num_experts(mixture: StackedMixture, local: int) -> None:
    """Let the module know how many experts are here."""
    for key, value in list(vars(mixture.module).items()):
        if "expert" in key and type(value) is int and value == mixture.num_experts:
            setattr(mixture.module, key, local)


def spread_batched(mixture: StackedMixture, placement: ExpertPlacement) -> None:
    """Replaces the forward of the module: its own one computes what comes to this worker."""
    compute = mixture.module.forward
    group = placement.group

    def forward(x: Tensor) -> Tensor:
        if x.dim() < 3 or x.shape[0] != placement.num_experts:
            raise BadInput(
                f"{mixture.name} takes {tuple(x.shape)}: stacked experts that ep spreads take "
                f"(experts, tokens, width), or tokens, expert indices and weights"
            )
        own_shape = torch.tensor(x.shape[1:], device=x.device)
        table = own_shape.new_empty(group.size, len(own_shape))  # what each rank has for an expert
        group.all_gather(table, own_shape).wait()
        shapes: list[list[int]] = table.tolist()
        counts = [len(r) for r in placement.ranges]
        local = len(placement.local)
        sent = [count * math.prod(x.shape[1:]) for count in counts]
        received = [local * math.prod(shape) for shape in shapes]
        pieces = torch.split(exchange(x.reshape(-1), group, sent, received), received)
        results = [compute(p.view(local, *s)) for p, s in zip(pieces, shapes, strict=True)]
        own = results[group.rank].shape[1:]
        back = [count * math.prod(own) for count in counts]
        flat = torch.cat([result.reshape(-1) for result in results])
        out = exchange(flat, group, [r.numel() for r in results], back)
        return out.view(placement.num_experts, *own)

    _set_num_experts(mixture, len(placement.local))
    mixture.module.forward = forward
