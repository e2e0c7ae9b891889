"""Arithmetic on one slice of a model: weights, the sum of gradients, and their optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.replica.ordered_sum import Node, full_subtrees, runs_of, tree_sum
from shoal.server.model.named_optimizer import ratios
from shoal.server.protocol.frames import Refused
from shoal.server.protocol.messages import ModelSpec, ParameterSlice, ShardState, StateTensor

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float64", "bfloat16", "float16"),
        *("int64", "int32", "uint8", "bool"),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_STATE_TENSORS = 16  # of an optimizer, for one parameter


class Shard:
    """One slice of the flat buffer, without connections or threads.

    `loss_flags` is the sum of what workers push beside gradients: the loss, then one flag per
    parameter that is positive if the parameter has a gradient.
    """

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.size = spec.stop - spec.start
        self.dtype = DTYPES[spec.dtype]
        self.data = torch.zeros(self.size, dtype=self.dtype)
        self.sum = torch.zeros(self.size, dtype=self.dtype)
        self.loss_flags = torch.zeros(1 + spec.parameters, dtype=DTYPES[spec.loss_flags_dtype])
        self.params = [nn.Parameter(self._view(self.data, i)) for i in range(len(spec.slices))]
        self._grads = [self._view(self.sum, i) for i in range(len(spec.slices))]
        self._subtrees = subtrees_of(spec)
        self._copies = frozenset(spec.split.copies)
        self.optimizer: torch.optim.Optimizer | None = None
        if spec.optimizer is not None and self.params:
            numbers = [held.parameter for held in spec.slices]
            self.optimizer = spec.optimizer.make(self.params, numbers)
            self._ratios = ratios(self.optimizer)

    @property
    def pulled(self) -> Tensor:
        """What workers pull: weights, or the summed gradient if the workers update."""
        return self.data if self.spec.optimizer is not None else self.sum

    def new_gradients(self) -> Tensor:
        """Memory for the gradients of one push, by partial sum."""
        return torch.zeros(partial_sums(self.spec), self.size, dtype=self.dtype)

    def new_loss_flags(self) -> Tensor:
        """Memory for the loss and flags of one push, by partial sum."""
        return self.loss_flags.new_zeros(partial_sums(self.spec), len(self.loss_flags))

    def move_to(self, data: Tensor) -> None:
        """Keep the weights in this memory from now on; their values stay."""
        data.copy_(self.data)
        self.data = data
        for i, p in enumerate(self.params):
            p.data = self._view(data, i)

    def add(self, gradients: Tensor, loss_flags: Tensor, first: bool) -> None:
        """Add the push of one worker on arrival; the `first` of a step starts the sum."""
        for total, pushed in ((self.sum, gradients[0]), (self.loss_flags, loss_flags[0])):
            if first:
                total.copy_(pushed)
            else:
                total.add_(pushed)

    def add_all(self, pushes: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The sum of the pushes of all workers, in an order that is independent of arrival."""
        self._sum_into(self.sum, [gradients for gradients, _ in pushes])
        self._sum_into(self.loss_flags, [loss_flags for _, loss_flags in pushes])

    def _sum_into(self, total: Tensor, pushes: Sequence[Tensor]) -> None:
        if self._subtrees is not None:
            total.copy_(self._ordered_sum(pushes, self._subtrees))
        elif len(pushes) > 1:
            torch.add(pushes[0][0], pushes[1][0], out=total)
            for pushed in pushes[2:]:
                total.add_(pushed[0])
        else:
            total.copy_(pushes[0][0])

    def _ordered_sum(self, pushes: Sequence[Tensor], subtrees: Sequence[list[Node]]) -> Tensor:
        assert self.spec.microbatches is not None
        known = {
            node: pushed[i]
            for pushed, nodes in zip(pushes, subtrees, strict=True)
            for i, node in enumerate(nodes)
        }
        return tree_sum((0, self.spec.microbatches), known)

    def divide(self, by: float) -> None:
        if by not in (0.0, 1.0):
            self.sum.div_(by)

    def norms(self) -> list[float]:
        """The norms of the gradients, for clipping.

        Where workers compute the total norm, there is one for every slice of a parameter. It is
        0 if the parameter has no gradient.
        """
        if self.spec.norm_from_workers:
            return [
                float(torch.linalg.vector_norm(grad)) if self._has_grad(held) else 0.0
                for grad, held in zip(self._grads, self.spec.slices, strict=True)
            ]
        return [float(torch.linalg.vector_norm(grad)) for grad in self._counted_grads()]

    def update(self, lr: float | None, factor: float | None) -> None:
        """One step of the optimizer on the sum."""
        if self.optimizer is None:
            return
        if factor is not None:
            self.sum.mul_(factor)
        if lr is not None:
            for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
                group["lr"] = lr * ratio
        for p, grad, held in zip(self.params, self._grads, self.spec.slices, strict=True):
            p.grad = grad if self._has_grad(held) else None
        self.optimizer.step()
        for p in self.params:
            p.grad = None

    def _has_grad(self, held: ParameterSlice) -> bool:
        return bool(self.loss_flags[1 + held.parameter] > 0)

    def _counted_grads(self) -> list[Tensor]:
        """The gradients of this step, without those that another shard of the model counts."""
        return [
            grad
            for grad, held in zip(self._grads, self.spec.slices, strict=True)
            if self._has_grad(held) and held.parameter not in self._copies
        ]

    # ------------------------------------------------------------------ checkpoints

    def state(self, steps: int) -> tuple[ShardState, list[Tensor]]:
        """The optimizer's state, by parameter slice."""
        specs = []
        tensors = []
        numbers = []
        for i, p in enumerate(self.params):
            entries = self.optimizer.state.get(p, {}) if self.optimizer is not None else {}
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    specs.append(StateTensor(i, key, _name(value.dtype), tuple(value.shape)))
                    tensors.append(value.detach().contiguous())
                elif value is None or isinstance(value, (bool, int, float)):
                    numbers.append((i, key, value))
        return ShardState(steps, tuple(specs), tuple(numbers), weights=False), tensors

    def check_state(self, state: ShardState) -> int:
        """The bytes of its payload; Refused if a tensor does not fit its parameter slice."""
        total = self.size * self.dtype.itemsize if state.weights else 0
        if len(state.tensors) > _MAX_STATE_TENSORS * len(self.params):
            raise Refused(
                f"{len(state.tensors)} tensors of state for {len(self.params)} parameters"
            )
        for tensor in state.tensors:
            count = math.prod(tensor.shape)
            if tensor.slice >= len(self.params):
                raise Refused(f"state of slice {tensor.slice}, which is not held here")
            if count > max(1, self.params[tensor.slice].numel()):
                raise Refused(f"state {tensor.key!r} {tensor.shape} does not fit its parameter")
            total += count * DTYPES[tensor.dtype].itemsize
        if any(i >= len(self.params) for i, _, _ in state.numbers):
            raise Refused("state of a slice that is not held here")
        return total

    def restore(self, state: ShardState, payload: bytearray) -> None:
        """Replace weights and optimizer state; `check_state` has accepted them."""
        flat = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0)
        weight_bytes = self.size * self.dtype.itemsize if state.weights else 0
        if weight_bytes:
            self.data.copy_(flat[:weight_bytes].view(self.dtype))
        if self.optimizer is not None:
            self._load(self.optimizer, state, read_tensors(state, flat, weight_bytes))

    def restore_optimizer(self, state: ShardState, tensors: Sequence[Tensor]) -> None:
        """Replace the optimizer state by what `state` has returned."""
        if self.optimizer is not None:
            self._load(self.optimizer, state, [tensor.clone() for tensor in tensors])

    def _load(
        self, optimizer: torch.optim.Optimizer, state: ShardState, tensors: Sequence[Tensor]
    ) -> None:
        entries: dict[int, dict[str, Any]] = {}
        for spec, tensor in zip(state.tensors, tensors, strict=True):
            entries.setdefault(spec.slice, {})[spec.key] = tensor
        for i, key, number in state.numbers:
            entries.setdefault(i, {})[key] = number
        document = optimizer.state_dict()
        numbers = self._numbers(optimizer, document)
        document["state"] = {numbers[i]: values for i, values in entries.items()}
        for group, options in zip(document["param_groups"], state.options, strict=False):
            group.update({k: v for k, v in options.items() if k in group and k != "params"})
        optimizer.load_state_dict(document)

    def _numbers(self, optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> list[int]:
        """The key of each parameter in the optimizer's state: a number in the order of groups."""
        numbers: dict[int, int] = {}
        for group, saved in zip(optimizer.param_groups, document["param_groups"], strict=True):
            numbers |= dict(zip(map(id, group["params"]), saved["params"], strict=True))
        return [numbers[id(p)] for p in self.params]

    def _view(self, buffer: Tensor, i: int) -> Tensor:
        held = self.spec.slices[i]
        start = held.start - self.spec.start
        return buffer[start : start + math.prod(held.shape)].view(held.shape)


def read_tensors(state: ShardState, flat: Tensor, offset: int = 0) -> list[Tensor]:
    """The tensors of a payload of bytes, from `offset` on. Copies: they may be unaligned there."""
    tensors = []
    for spec in state.tensors:
        dtype = DTYPES[spec.dtype]
        end = offset + math.prod(spec.shape) * dtype.itemsize
        tensors.append(flat[offset:end].clone().view(dtype).reshape(spec.shape))
        offset = end
    return tensors


def subtrees_of(spec: ModelSpec) -> list[list[Node]] | None:
    """The subtrees that each worker pushes, where additions have a fixed order."""
    if spec.microbatches is None:
        return None
    runs = runs_of(spec.microbatches, spec.rule.workers)
    return [full_subtrees((0, spec.microbatches), run) for run in runs]


def partial_sums(spec: ModelSpec) -> int:
    """How many sums a worker pushes: one, or one per subtree where additions have a fixed order."""
    subtrees = subtrees_of(spec)
    return 1 if subtrees is None else max(map(len, subtrees))


def clip_factor(norms: Sequence[float], bound: float, dtype: torch.dtype) -> float:
    """The factor that clips gradients, as `torch.nn.utils.clip_grad_norm_` computes it."""
    if not norms:
        return 1.0
    total = torch.linalg.vector_norm(torch.tensor(norms, dtype=dtype))
    return float(torch.clamp(bound / (total + 1e-6), max=1.0))


def _name(dtype: torch.dtype) -> Any:
    return NAMES[dtype]
