"""Records the operations of a module's forward and backward, layer by layer."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.plan.tracing.ops import bytes_of, cost_of, grouped_shape, named_arguments
from shoal.plan.workloads import HeldTensor
from shoal.plan.workloads.traced_workload import Divided, Line, Phase, TracedKernel, TracedMessage
from shoal.runtime.pytree import tensors_of


class SavedTensors:
    """Knows which memory of saved tensors is new; that of `known` tensors does not count."""

    def __init__(self, known: Iterable[Tensor]):
        self._known = {t.untyped_storage()._cdata for t in known}
        self._seen: dict[int, Any] = {}
        self.total = 0

    def note(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return tensor

    def add(self, tensor: Tensor) -> int:
        """The bytes of its storage, if that was not counted before."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known or storage._cdata in self._seen:
            return 0
        self._seen[storage._cdata] = storage  # kept, so that its number is not given again
        self.total += storage.nbytes()
        return storage.nbytes()


_INSIDE: dict[str, Divided] = {  # what is divided of the kernels in a module, by its role
    "column": "column",
    "gathered": "column",
    "row": "row",
    "vocabulary": "all",
    "whole": "all",
}
_EXPERTS_A_TOKEN = 2  # where the arguments do not say it
_SUMMED = ("row", "vocabulary", "whole")  # outputs are summed over ranks
_COPIED = ("column", "gathered", "whole")  # gradients of inputs are
_VIEWS = [f"{name}Backward0" for name in ("T", "View", "Transpose", "ToCopy", "Permute")]


@dataclass
class RecordedLayer:
    """One layer of one trace; `sizes` are those of a `TracedLayer` by name."""

    kernels: list[TracedKernel] = field(default_factory=list)
    messages: list[TracedMessage] = field(default_factory=list)
    sizes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Recorded(NamedTuple):
    layers: dict[str, RecordedLayer]  # in the order of forward
    tensors: tuple[HeldTensor, ...]  # in the order of the model; a shared one for every layer


class Splits(NamedTuple):
    """What tp and ep would split of a model."""

    roles: Mapping[str, str]  # of modules under tp
    experts: Mapping[str, frozenset[str]]  # parameters of experts, by the module that calls them


class _Position(NamedTuple):
    """Where an operation happens."""

    layer: str | None  # None before the first one
    module: str  # inside the layer
    divided: Divided


class TraceRecorder:
    """Follows one forward and backward of a model."""

    def __init__(self, model: nn.Module, layers: Sequence[str], splits: Splits):
        self._model = model
        self._units = set(layers)
        self._roles = splits.roles
        self._experts = splits.experts
        self._layers: dict[str, RecordedLayer] = {}
        self._before_first = RecordedLayer()
        self._stack: list[str] = []
        self._layer: str | None = None
        self._is_between = False  # after a column layer, before its row layer
        self._params = {p.untyped_storage()._cdata for p in model.parameters()}
        self._copies: list[Tensor] = []  # of parameters, kept so that their numbers stay theirs
        self._saved = SavedTensors([*model.parameters(), *model.buffers()])
        self._places: list[tuple[int, _Position]] = []
        self._last = _Position(None, "", "")
        self._is_backward = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                enter = partial(self._enter, name)
                leave = partial(self._leave, name)
                before = module.register_forward_pre_hook(enter, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(leave).remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
            stack.enter_context(_Operations(self))
            self._mark()
            yield

    def begin_backward(self) -> None:
        """Operations from here on are those of backward."""
        self._is_backward = True

    def recorded(self) -> Recorded:
        if not self._layers:
            self._layers[""] = RecordedLayer()
        first = next(iter(self._layers.values()))
        first.kernels[:0] = self._before_first.kernels
        for name, size in self._before_first.sizes.items():
            first.sizes[name] += size
        held = self._held_tensors()
        modules = self._model.modules()
        parameters = sum(len(list(one.parameters(recurse=False))) for one in modules)
        self._count_parameters(held[:parameters])
        return Recorded(self._layers, held)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stack.append(name)
        if self._is_backward:
            return
        role = self._roles.get(name)
        given = tensors_of((args, kwargs))
        if name in self._units:
            num_bytes = bytes_of([t for t in given if t.requires_grad])
            if self._layer is not None and num_bytes:
                self._layers[self._layer].sizes["output_bytes"] = num_bytes
            self._layer = name
            sizes = self._layers.setdefault(name, RecordedLayer()).sizes
            sizes["input_bytes"] = sizes["input_bytes"] or num_bytes
        if role in _COPIED:
            self._send("all_reduce", bytes_of(given[:1]), "input")
        if name in self._experts and given:
            # each token goes to the workers of its experts and comes back, in both directions
            chosen = [t for t in given if not t.is_floating_point() and t.dim() > 1]
            copies = chosen[0].shape[-1] if chosen else _EXPERTS_A_TOKEN
            phases: tuple[Phase, ...] = ("forward", "forward", "input", "input")
            for phase in phases:
                self._send("all_to_all", copies * bytes_of(given[0]), phase, "ep")
        self._mark()

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        if self._is_backward:
            return
        role = self._roles.get(name)
        if role in _SUMMED:
            self._send("all_reduce", bytes_of(tensors_of(output)[:1]), "forward")
        if role == "gathered":
            self._send("all_gather", bytes_of(tensors_of(output)[:1]), "forward")
        if role in ("column", "row", "gathered"):
            self._is_between = role == "column"
        if name in self._units:
            made = tensors_of(dict(output) if hasattr(output, "keys") else output)
            outputs = [t for t in made if t.requires_grad]
            self._layers[name].sizes["output_bytes"] = bytes_of(outputs[:1])
        self._mark()

    def _send(self, kind: str, num_bytes: float, phase: Phase, axis: str = "tp") -> None:
        if self._layer is not None:
            message = TracedMessage(kind, axis, Line(num_bytes, num_bytes), phase)
            self._layers[self._layer].messages.append(message)

    def _mark(self) -> None:
        """From here on autograd nodes belong to this position."""
        self._places.append((torch.autograd._get_sequence_nr(), self._here()))  # type: ignore[attr-defined]

    def _here(self) -> _Position:
        prefix = self._layer or ""
        top = self._stack[-1] if self._stack else ""
        inside = top.removeprefix(prefix).strip(".") if top.startswith(prefix) else ""
        for name in reversed(self._stack):
            if name in self._roles and self._roles[name] in _INSIDE:
                return _Position(self._layer, inside, _INSIDE[self._roles[name]])
        return _Position(self._layer, inside, "all" if self._is_between else "")

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        arguments = named_arguments(func, args, kwargs)
        if func.overloadpacket is torch.ops.aten._to_copy and self._reads_parameter(args):
            self._copies.append(out)
            self._params.add(out.untyped_storage()._cdata)
        cost = cost_of(func, arguments, out)
        if not cost.kernels:
            return
        position, phase = self._place(args)
        layer = self._layers[position.layer] if position.layer is not None else self._before_first
        layer.sizes["flops"] += cost.flops
        if self._is_backward:
            layer.sizes["passing"] = max(layer.sizes["passing"], bytes_of(out))
        for kernel in cost.kernels:
            name = f"{position.module} {kernel.name}".strip()
            chosen: Phase = "weight" if kernel.name.endswith("weight gradient") else phase
            named = kernel._replace(name=name)
            layer.kernels.append(TracedKernel(named, named, chosen, position.divided))

    def _place(self, args: Sequence[Any]) -> tuple[_Position, Phase]:
        if not self._is_backward:
            return self._here(), "forward"
        node = torch._C._current_autograd_node()
        if node is not None and not node.name().endswith("AccumulateGrad"):
            number = node._sequence_nr()
            at = bisect.bisect_right(self._places, number, key=lambda place: place[0])
            self._last = self._places[max(0, at - 1)][1]
        is_weight = node is not None and _leads_to_parameter(node)
        return self._last, "weight" if is_weight and not self._reads_parameter(args) else "input"

    def _reads_parameter(self, args: Sequence[Any]) -> bool:
        return any(t.untyped_storage()._cdata in self._params for t in tensors_of(list(args)))

    def _pack(self, tensor: Tensor) -> Tensor:
        fresh = self._saved.add(tensor)
        position = self._here()
        layer = self._layers[position.layer] if position.layer is not None else self._before_first
        is_divided = position.divided in ("row", "all")
        layer.sizes["divided_activations" if is_divided else "activations"] += fresh
        return tensor

    def _held_tensors(self) -> tuple[HeldTensor, ...]:
        """Every layer that uses a tensor has it; each layer is a unit of zero(3)."""
        of_experts = set().union(*self._experts.values())
        places = {name: place for place, name in enumerate(self._layers)}
        names: dict[int, str] = {}
        held = []
        for module_name, own, tensor in _named_tensors(self._model):
            name = names.setdefault(id(tensor), f"{module_name}.{own}".strip("."))
            layer = places.get(self._layer_of(module_name) or "", 0)
            flags = (self._divides(module_name, own) != "", name in of_experts)
            shape = tuple(tensor.shape)
            held.append(HeldTensor(name, shape, layer, layer + 1, *flags, tensor.requires_grad))
        return tuple(held)

    def _count_parameters(self, held: Iterable[HeldTensor]) -> None:
        """A parameter counts in the first of its layers; the others share it."""
        layers = list(self._layers.values())
        homes: dict[str, int] = {}
        for tensor in sorted(held, key=lambda tensor: tensor.layer):
            sizes = layers[tensor.layer].sizes
            number = math.prod(tensor.shape)
            if tensor.name in homes:
                is_shared = homes[tensor.name] != tensor.layer
                sizes["shared_parameters"] += number if is_shared else 0
                continue
            homes[tensor.name] = tensor.layer
            sizes["divided_parameters" if tensor.is_divided else "parameters"] += number
            sizes["expert_parameters"] += number if tensor.is_expert else 0

    def _layer_of(self, name: str) -> str | None:
        """The nearest layer around a module that was called."""
        while name not in self._layers:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return name

    def _divides(self, module: str, parameter: str) -> Divided:
        while True:
            role = self._roles.get(module)
            if role is not None and role in _INSIDE:
                is_bias = role == "row" and parameter == "bias"
                return "" if is_bias else _INSIDE[role]
            if not module:
                return ""
            module = module.rpartition(".")[0]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: TraceRecorder):
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        grouped = grouped_shape(func, args, kwargs or {})
        # torch's own rule for fake tensors takes bf16 alone
        out = func(*args, **(kwargs or {})) if grouped is None else args[0].new_empty(grouped)
        self._recorder.note(func, args, kwargs or {}, out)
        return out


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """The module that has one, its name there, and the tensor: parameters, then buffers."""
    for kind in ("named_parameters", "named_buffers"):
        for name, module in model.named_modules():
            for own, tensor in getattr(module, kind)(recurse=False):
                yield name, own, tensor


def _leads_to_parameter(node: Any, depth: int = 4) -> bool:
    """Whether a gradient of this node goes to a parameter, past views and casts."""
    for following, _ in node.next_functions:
        if following is None:
            continue
        name = following.name()
        if name.endswith("AccumulateGrad"):
            return True
        if depth and name in _VIEWS and _leads_to_parameter(following, depth - 1):
            return True
    return False
