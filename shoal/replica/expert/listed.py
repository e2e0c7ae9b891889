"""A block whose forward calls the experts of a list, some of which live on other workers.

    record    the forward runs once; a call of an expert notes its rows and returns zeros
    exchange  all rows travel at once to the workers of their experts, and the results back
    replay    the forward runs again; a call of an expert returns the results

The block may call experts in any order, several times, or leave some out: ranks need not call the
same ones. Random numbers, buffers and attributes are after the record what they were before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.group import Op
from shoal.errors import BadInput
from shoal.pytree import Tree, map_tensors, tensors_of
from shoal.replica.context.sequence_shard import SequenceShard
from shoal.replica.expert.dispatch import Dispatch, ExpertPlacement
from shoal.replica.expert.mixtures import ListedMixture
from shoal.replica.microbatch import default_generators
from shoal.replica.split.sharded_tensor import full_tensors


class _Call(NamedTuple):
    expert: int
    tokens: Tensor


class ListedExperts:
    """Replaces the forward of the block and those of its experts."""

    def __init__(self, mixture: ListedMixture, placement: ExpertPlacement):
        self._names = list(mixture.experts)
        self._block = mixture.block
        self._placement = placement
        self._forward = mixture.block.forward
        self._compute = [expert.forward for expert in mixture.experts.values()]
        self._others = _modules_without(mixture.block, mixture.experts.values())
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
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 1:
            raise BadInput(
                f"{self._names[expert]} is called with more than one tensor: experts that ep "
                "places on other workers take one tensor of tokens"
            )
        if self._calls is not None:
            return self._note(_Call(expert, args[0]))
        if self._results is None:
            raise BadInput(
                f"{self._names[expert]} is called outside the forward of "
                f"{type(self._block).__name__}, which has the list of experts"
            )
        return self._result(_Call(expert, args[0]))

    def _note(self, call: _Call) -> Tensor:
        assert self._calls is not None
        self._calls.append(call)
        like = self._probe(call.tokens)
        return like.new_zeros(*call.tokens.shape[:-1], like.shape[-1])

    def _result(self, call: _Call) -> Tensor:
        assert self._results is not None
        noted, result = next(self._results, (None, None))
        if noted is None or result is None or noted.expert != call.expert:
            raise self._differs()
        if noted.tokens.shape != call.tokens.shape or not self._is_same(noted.tokens, call.tokens):
            raise self._differs()
        return result

    def _is_same(self, noted: Tensor, tokens: Tensor) -> bool:
        return self._is_checked or torch.allclose(noted.detach(), tokens.detach(), equal_nan=True)

    def _differs(self) -> BadInput:
        return BadInput(
            f"the tokens that {type(self._block).__name__} sends to its experts depend on what "
            "the experts return, so they cannot live on different workers: omit ep"
        )

    # ------------------------------------------------------------------ record and exchange

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Call]:
        self._calls = []
        args, kwargs = map_tensors(_copy, (args, kwargs))
        devices = [t.device for t in tensors_of((args, kwargs))]
        try:
            with _unchanged(self._others, devices[0] if devices else torch.device("cpu")):
                self._forward(*args, **kwargs)
            return self._calls
        finally:
            self._calls = None

    def _exchange(self, calls: Sequence[_Call], inputs: Tree) -> list[Tensor]:
        """What the experts make of the tokens of each call."""
        tokens = self._rows(calls, inputs)
        experts = [torch.full((_num_rows(c),), c.expert) for c in calls]
        called = torch.zeros(len(self._names), dtype=torch.bool)
        called[[c.expert for c in calls]] = True
        indices = torch.cat(experts) if experts else torch.zeros(0, dtype=torch.int64)
        device = tokens.device
        dispatch = Dispatch(self._placement, indices.to(device), called.to(device))
        x = dispatch.to_experts(tokens.index_select(0, dispatch.order))
        results = dispatch.to_sources(self._local(x, dispatch))
        pieces = torch.split(results, [_num_rows(c) for c in calls])
        width = results.shape[-1]
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
        results = [
            self._compute[expert](piece)
            for expert, piece, called in zip(
                self._placement.local, pieces, dispatch.was_called, strict=True
            )
            if called
        ]
        if results:
            return torch.cat(results)
        like = self._probe(x)
        return like.new_zeros(0, like.shape[-1]) + x.sum() * 0

    def _probe(self, tokens: Tensor) -> Tensor:
        """What an expert returns for a row: its width and type."""
        key = (tokens.shape[-1], tokens.dtype)
        if key not in self._probed:
            self._probed[key] = self._compute_row(tokens.new_zeros(1, tokens.shape[-1]))
        return self._probed[key]

    @torch.no_grad()
    def _compute_row(self, row: Tensor) -> Tensor:
        out = self._compute[self._placement.local.start](row)
        if not isinstance(out, Tensor) or out.shape[:-1] != row.shape[:-1]:
            raise BadInput(
                f"{self._names[self._placement.local.start]} does not return a row for each token, "
                "so ep cannot place it on another worker"
            )
        return out


def _shard_like(tokens: SequenceShard, out: Tensor) -> Tensor:
    """This rank's positions of a result that has a row for each token."""
    spec = tokens.spec
    if out.shape[:-1] != tokens.full_shape[:-1] or spec.dim >= out.dim() - 1:
        return out
    return tokens.context.wrap(spec.take_local(out, tokens.context.rank), spec)


def _num_rows(call: _Call) -> int:
    return call.tokens.shape[:-1].numel()


def _copy(tensor: Tensor) -> Tensor:
    """With its graph; a forward may change its inputs in place."""
    return tensor.clone() if tensor.is_floating_point() else tensor


def _modules_without(block: nn.Module, experts: Any) -> list[nn.Module]:
    inside = {id(module) for expert in experts for module in expert.modules()}
    return [module for module in block.modules() if id(module) not in inside]


@contextmanager
def _unchanged(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore random generators, and buffers and attributes of modules, afterwards."""
    generators = default_generators(device)
    states = [generator.get_state() for generator in generators]
    attributes = [(module, dict(vars(module))) for module in modules]
    lists = [(v, list(v)) for _, saved in attributes for v in saved.values() if type(v) is list]
    buffers = [(m._buffers, dict(m._buffers)) for m in modules]
    values = [(b, b.clone()) for _, own in buffers for b in own.values() if b is not None]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        for buffer, value in values:
            buffer.data.copy_(value)
        for current, before in [*buffers, *((vars(m), saved) for m, saved in attributes)]:
            _restore(current, before)
        for content, before_list in lists:
            content[:] = before_list


def _restore(current: dict[str, Any], before: dict[str, Any]) -> None:
    for key in set(current) - set(before):
        del current[key]
    current.update(before)
