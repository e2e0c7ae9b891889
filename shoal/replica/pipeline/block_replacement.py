"""One forward in which the blocks are not computed: each returns the result of all of them.

The last stage of a `BlockSplit` runs the model's forward like that. What is computed before the
blocks is not used. Every such forward is checked: it hands on what the blocks return, and does
nothing else between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.errors import BadInput
from shoal.pytree import Tree, tensors_of
from shoal.replica.microbatch import default_generators
from shoal.replica.pipeline.split_backward import nodes_behind
from shoal.replica.tensor.sharded_tensor import LOCAL_METADATA

_PLAIN = (bool, int, float, str, type(None))
_METADATA = LOCAL_METADATA | {Tensor.shape.__get__, Tensor.size}  # type: ignore[attr-defined]


class Blocks(Protocol):
    """The row of blocks of a model, and how a forward that does not fit is refused."""

    names: list[str]
    blocks: list[nn.Module]

    def refused(self, what: str) -> BadInput: ...


class BlockReplacement:
    """`result` replaces what the blocks return. With `records`, autograd follows all of it."""

    def __init__(self, split: Blocks, result: Tensor, records: bool):
        self.split = split
        self.result = result
        self._records = records
        self._called = 0
        self._other_args: tuple[Sequence[Any], dict[str, Any]] = (), {}
        self._between = ExitStack()

    def __enter__(self) -> None:
        """Before the blocks nothing is trained here, and nothing random is drawn."""
        self._generators = default_generators(self.result.device)
        self._rng_states = [generator.get_state() for generator in self._generators]
        self._grad_enabled = torch.is_grad_enabled()
        self._start = _next_node_number()
        torch.set_grad_enabled(self._records)

    def __exit__(self, *_: object) -> None:
        self._between.close()
        torch.set_grad_enabled(self._grad_enabled)

    def calls(self) -> dict[nn.Module, Callable[..., Any]]:
        """What is called instead of the blocks."""
        return {block: self._replacement(i) for i, block in enumerate(self.split.blocks)}

    def check_end(self) -> None:
        if self._called != len(self.split.blocks):
            raise self.split.refused(f"calls {self._called} of them")

    def is_bypassed(self, outputs: Tree) -> bool:
        """Whether the outputs depend on what was computed before the blocks, but not by them."""
        roots = [t for t in tensors_of(outputs) if t.requires_grad]
        numbers = [node._sequence_nr() for node in nodes_behind(roots)]
        return any(self._start <= number < self._middle for number in numbers)

    def _replacement(self, index: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            self._between.close()
            if index != self._called:
                raise self.split.refused("does not call them in their order, each once")
            if index == 0:
                self._begin(args, kwargs)
            else:
                self._check_arguments(index, args, kwargs)
            self._called += 1
            if self._called < len(self.split.blocks):
                self._between.enter_context(_NoComputation(self.split))
            return self.result

        return call

    def _check_arguments(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args or args[0] is not self.result:
            raise self.split.refused(
                f"gives {self.split.names[index]} something else than "
                "what the block before it returned"
            )
        if not _same((args[1:], kwargs), self._other_args):
            raise self.split.refused(
                f"gives {self.split.names[index]} other arguments than those before it"
            )

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The blocks are reached: from here on the forward is trained and draws numbers."""
        self._other_args = args[1:], kwargs
        self._middle = _next_node_number()
        torch.set_grad_enabled(self._grad_enabled)
        for generator, state in zip(self._generators, self._rng_states, strict=True):
            generator.set_state(state)


class _NoComputation(TorchFunctionMode):
    """Between blocks no tensor is computed with."""

    def __init__(self, split: Blocks):
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _METADATA:
            name = getattr(func, "__name__", func)
            raise self._split.refused(f"computes ({name}) between them")
        return func(*args, **(kwargs or {}))


@contextmanager
def replaced_forwards(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """These are called instead of the forward of modules."""
    for module, call in calls.items():
        module.__dict__["forward"] = call
    try:
        yield
    finally:
        for module in calls:
            del module.__dict__["forward"]


def _same(one: Any, other: Any) -> bool:
    """The same tensors and equal plain values at the same positions."""
    if isinstance(one, _PLAIN):
        return type(one) is type(other) and one == other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other


def _next_node_number() -> int:
    """Nodes of autograd's graph that this thread makes from now on have this number or more."""
    with torch.enable_grad():
        node: Any = (torch.zeros(1, requires_grad=True) * 1).grad_fn
        return int(node._sequence_nr())
