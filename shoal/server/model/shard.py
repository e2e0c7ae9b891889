"""What one server holds of one model: weights, the sum of gradients, and its own optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.replica.ordered_sum import Node, add_up, runs_of, whole_subtrees
from shoal.server.model.named_optimizer import ratios
from shoal.server.protocol.frames import Refused
from shoal.server.protocol.messages import Spec, State, Value

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float64", "bfloat16", "float16"),
        *("int64", "int32", "uint8", "bool"),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_STATE = 16  # entries of an optimizer for one parameter


class Shard:
    """One slice of the flat buffer. Nothing here knows of connections or threads."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.size = spec.stop - spec.start
        self.dtype = DTYPES[spec.dtype]
        self.head_dtype = DTYPES[spec.head_dtype]
        self.head_size = 1 + spec.parameters
        self.data = torch.zeros(self.size, dtype=self.dtype)
        self.sum = torch.zeros(self.size, dtype=self.dtype)
        self.head = torch.zeros(self.head_size, dtype=self.head_dtype)
        self.params = [nn.Parameter(self._view(self.data, i)) for i in range(len(spec.cuts))]
        self._grads = [self._view(self.sum, i) for i in range(len(spec.cuts))]
        self._nodes = nodes_of(spec)
        self._copies = frozenset(spec.place.copies)
        self.optimizer: torch.optim.Optimizer | None = None
        if spec.optimizer is not None and self.params:
            self.optimizer = spec.optimizer.make(self.params, [c.parameter for c in spec.cuts])
            self._ratios = ratios(self.optimizer)

    @property
    def parts(self) -> int:
        """Sums that a worker pushes: one, or a whole subtree each where additions have an order."""
        return parts_of(self.spec)

    def move_to(self, data: Tensor) -> None:
        """Keep the weights in this memory from now on; they are what they were."""
        data.copy_(self.data)
        self.data = data
        for i, p in enumerate(self.params):
            p.data = self._view(data, i)

    def add(self, gradients: Tensor, head: Tensor, first: bool) -> None:
        """Add the push of one worker, as it comes; the `first` of a step starts the sum."""
        for into, part in ((self.sum, gradients[0]), (self.head, head[0])):
            if first:
                into.copy_(part)
            else:
                into.add_(part)

    def add_all(self, pushes: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The sum of everybody's pushes, in an order that does not depend on their arrival."""
        for into, column in ((self.sum, 0), (self.head, 1)):
            parts = [push[column] for push in pushes]
            if self._nodes is None and len(parts) > 1:
                torch.add(parts[0][0], parts[1][0], out=into)
                for part in parts[2:]:
                    into.add_(part[0])
            elif self._nodes is None:
                into.copy_(parts[0][0])
            else:
                known = {
                    node: part[i]
                    for part, nodes in zip(parts, self._nodes, strict=True)
                    for i, node in enumerate(nodes)
                }
                assert self.spec.microbatches is not None
                into.copy_(add_up((0, self.spec.microbatches), known))

    def divide(self, by: float) -> None:
        if by not in (0.0, 1.0):
            self.sum.div_(by)

    def norms(self) -> list[float]:
        """The norm of each gradient that is there; of a part of a model one for every cutting."""
        if self.spec.is_part:
            flags = [self.head[1 + cut.parameter] > 0 for cut in self.spec.cuts]
            pairs = zip(self._grads, flags, strict=True)
            return [float(torch.linalg.vector_norm(g)) if there else 0.0 for g, there in pairs]
        return [float(torch.linalg.vector_norm(g)) for g in self._counted()]

    def update(self, lr: float | None, factor: float | None) -> None:
        """One step of the optimizer on the sum."""
        if self.optimizer is None:
            return
        if factor is not None:
            self.sum.mul_(factor)
        if lr is not None:
            for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
                group["lr"] = lr * ratio
        for p, grad, cut in zip(self.params, self._grads, self.spec.cuts, strict=True):
            p.grad = grad if self.head[1 + cut.parameter] > 0 else None
        self.optimizer.step()
        for p in self.params:
            p.grad = None

    # ------------------------------------------------------------------ checkpoints

    def state(self, steps: int) -> tuple[State, list[Tensor]]:
        """The optimizer's state, cutting by cutting."""
        values = []
        tensors = []
        numbers = []
        for i, p in enumerate(self.params):
            held = self.optimizer.state.get(p, {}) if self.optimizer is not None else {}
            for key, value in held.items():
                if isinstance(value, Tensor):
                    values.append(Value(i, key, _name(value.dtype), tuple(value.shape)))
                    tensors.append(value.detach().contiguous())
                elif value is None or isinstance(value, (bool, int, float)):
                    numbers.append((i, key, value))
        return State(steps, tuple(values), tuple(numbers), weights=False), tensors

    def check_state(self, state: State) -> int:
        """The bytes of its payload; refused unless every tensor fits a cutting held here."""
        total = self.size * self.dtype.itemsize if state.weights else 0
        if len(state.tensors) > _MOST_STATE * len(self.params):
            raise Refused(
                f"{len(state.tensors)} tensors of state for {len(self.params)} parameters"
            )
        for value in state.tensors:
            count = math.prod(value.shape)
            if value.cut >= len(self.params) or count > max(1, self.params[value.cut].numel()):
                raise Refused(f"state {value.key!r} {value.shape} does not fit what is held here")
            total += count * DTYPES[value.dtype].itemsize
        if any(i >= len(self.params) for i, _, _ in state.numbers):
            raise Refused("state of a parameter that is not held here")
        return total

    def restore(self, state: State, payload: bytearray) -> None:
        """Take over weights and optimizer state; `check_state` has seen them."""
        flat = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0)
        at = 0
        if state.weights:
            at = self.size * self.dtype.itemsize
            if at:
                self.data.copy_(flat[:at].view(self.dtype))
        if self.optimizer is None:
            return
        held: dict[int, dict[str, Any]] = {}
        for value in state.tensors:
            dtype = DTYPES[value.dtype]
            end = at + math.prod(value.shape) * dtype.itemsize
            # a copy, since tensors may start anywhere in the payload
            tensor = flat[at:end].clone().view(dtype).reshape(value.shape)
            held.setdefault(value.cut, {})[value.key] = tensor
            at = end
        for i, key, number in state.numbers:
            held.setdefault(i, {})[key] = number
        document = self.optimizer.state_dict()
        numbers = self._numbers(document)
        document["state"] = {numbers[i]: entries for i, entries in held.items()}
        for group, options in zip(document["param_groups"], state.options, strict=False):
            group.update({k: v for k, v in options.items() if k in group and k != "params"})
        self.optimizer.load_state_dict(document)

    def _numbers(self, document: dict[str, Any]) -> list[int]:
        """What the optimizer calls each parameter in its state: a number in the order of groups."""
        assert self.optimizer is not None
        found: dict[int, int] = {}
        for group, packed in zip(
            self.optimizer.param_groups, document["param_groups"], strict=True
        ):
            found |= dict(zip(map(id, group["params"]), packed["params"], strict=True))
        return [found[id(p)] for p in self.params]

    def _counted(self) -> list[Tensor]:
        """The gradients that are there, and that no other part of the model counts."""
        return [
            grad
            for grad, cut in zip(self._grads, self.spec.cuts, strict=True)
            if self.head[1 + cut.parameter] > 0 and cut.parameter not in self._copies
        ]

    def _view(self, buffer: Tensor, i: int) -> Tensor:
        cut = self.spec.cuts[i]
        start = cut.start - self.spec.start
        return buffer[start : start + math.prod(cut.shape)].view(cut.shape)


def check_spec(spec: Spec, most_bytes: int) -> None:
    """Refuse a slice that is larger than the server allows, or whose parts do not fit into it."""
    if not spec.start <= spec.stop <= spec.size or spec.index >= spec.servers:
        raise Refused(f"a slice {spec.start}:{spec.stop} of {spec.size} elements")
    if spec.place.part >= spec.place.parts or (spec.place.follows is not None and not spec.index):
        raise Refused(f"part {spec.place.part} of {spec.place.parts}, which decides and follows")
    itemsize = DTYPES[spec.dtype].itemsize
    if (spec.size * (1 + parts_of(spec)) + 4 * (spec.stop - spec.start)) * itemsize > most_bytes:
        raise Refused(f"{spec.size} elements are more than this server can hold")
    if spec.microbatches is not None and spec.microbatches % spec.rule.workers:
        raise Refused(f"{spec.microbatches} micro-batches for {spec.rule.workers} workers")
    at = spec.start
    for cut in spec.cuts:
        size = math.prod(cut.shape)
        if not at <= cut.start or cut.start + size > spec.stop or cut.parameter >= spec.parameters:
            raise Refused(f"parameter {cut.parameter} does not lie in this slice")
        at = cut.start + size


def nodes_of(spec: Spec) -> list[list[Node]] | None:
    """The subtrees that each worker pushes, where additions have a fixed order."""
    if spec.microbatches is None:
        return None
    runs = runs_of(spec.microbatches, spec.rule.workers)
    return [whole_subtrees((0, spec.microbatches), run) for run in runs]


def parts_of(spec: Spec) -> int:
    nodes = nodes_of(spec)
    return 1 if nodes is None else max(map(len, nodes))


def clip_factor(norms: Sequence[float], bound: float, dtype: torch.dtype) -> float:
    """What to multiply gradients by, as `torch.nn.utils.clip_grad_norm_` does."""
    if not norms:
        return 1.0
    total = torch.linalg.vector_norm(torch.tensor(norms, dtype=dtype))
    return float(torch.clamp(bound / (total + 1e-6), max=1.0))


def _name(dtype: torch.dtype) -> Any:
    return NAMES[dtype]
