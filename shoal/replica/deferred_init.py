"""Models that were built on the meta device: shapes without memory.

    with torch.device("meta"):
        model = Net()

Each module that has parameters or buffers there is filled by its own `reset_parameters`, in the
order of `model.modules()`, on the CPU. For modules that initialise themselves that way when they
are made, in the order in which they are registered, this gives the model that building it on the
CPU gives after the same seed. What a model does to its parameters afterwards (in its own
`__init__`) is not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.errors import BadInput


class DeferredInit:
    """The modules of a model whose tensors have no memory yet."""

    def __init__(self, model: nn.Module):
        """Take parameters off the meta device, without memory yet; tied ones stay tied."""
        self._modules: set[int] = set()
        placeholders: dict[int, nn.Parameter] = {}
        for name, module in model.named_modules():
            tensors = [*module._parameters.values(), *module._buffers.values()]
            if any(t is not None and t.is_meta for t in tensors):
                if not callable(getattr(module, "reset_parameters", None)):
                    raise BadInput(
                        f"{name or 'the model'} ({type(module).__name__}) was built on the meta "
                        "device and has no reset_parameters to fill it with: build the model on "
                        "the CPU"
                    )
                self._modules.add(id(module))
                _replace_meta_parameters(module, placeholders)
        for module in model.modules():  # it draws no numbers, and may be replaced before `fill`
            if isinstance(module, nn.modules.batchnorm._NormBase):
                self.fill(module)

    def __bool__(self) -> bool:
        return bool(self._modules)

    def fill(self, module: nn.Module) -> None:
        """Give a module memory and its start values, if it has none yet."""
        if id(module) not in self._modules:
            return
        self._modules.remove(id(module))
        for p in module._parameters.values():
            if p is not None and is_placeholder(p):
                p.data = torch.empty(p.shape, dtype=p.dtype)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.zeros_like(buffer, device="cpu")
        module.reset_parameters()  # type: ignore[operator]

    def fill_all(self, model: nn.Module) -> None:
        for module in model.modules():
            self.fill(module)

    def fill_in_turn(self, model: nn.Module, device: torch.device) -> Iterator[list[TensorSlot]]:
        """Fill module after module, on `device`, and yield every tensor by its slots.

        A tensor comes as soon as no other module fills it. A caller that releases tensors as they
        come never holds all of them.
        """
        by_tensor: dict[int, list[TensorSlot]] = {}
        for slot in tensor_slots(model):
            by_tensor.setdefault(id(slot.tensor), []).append(slot)
        numbers = {module: number for number, module in enumerate(model.modules())}
        ready: dict[int, list[list[TensorSlot]]] = {}  # by the last module that has the tensor
        for slots in by_tensor.values():
            ready.setdefault(max(numbers[slot.module] for slot in slots), []).append(slots)
        for module, number in numbers.items():
            self.fill(module)
            for slots in ready.get(number, ()):
                move(slots, device)
                yield slots


def with_values_of_rank_0(
    filled: Iterator[list[TensorSlot]], world: Group
) -> Iterator[list[TensorSlot]]:
    """Tensors as they are filled, with the values that rank 0 has."""
    for slots in filled:
        tensor = slots[0].tensor
        if tensor.numel() and tensor.device.type != "meta":
            values = tensor.detach().contiguous()
            world.broadcast(values).wait()
            tensor.data.copy_(values)
        yield slots


class TensorSlot(NamedTuple):
    """An attribute of a module that holds a parameter or buffer; a tied tensor has several."""

    module: nn.Module
    key: str
    name: str

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.key)
        return tensor


def tensor_slots(model: nn.Module) -> Iterator[TensorSlot]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield TensorSlot(module, key, full_name(prefix, key))


def full_name(prefix: str, key: str) -> str:
    """The name in the model of what the module called `prefix` calls `key`."""
    return f"{prefix}.{key}" if prefix else key


def is_in(name: str, module: str) -> bool:
    """Whether it is the name of that module, or of something inside of it."""
    return name == module or not module or name.startswith(module + ".")


def _replace_meta_parameters(module: nn.Module, placeholders: dict[int, nn.Parameter]) -> None:
    for key, p in module._parameters.items():
        if p is not None and p.is_meta:
            if id(p) not in placeholders:
                empty = torch.zeros((), dtype=p.dtype).expand(p.shape)
                placeholders[id(p)] = nn.Parameter(empty, p.requires_grad)
            module._parameters[key] = placeholders[id(p)]


def move(slots: list[TensorSlot], device: torch.device) -> None:
    """Bring tensors to the device, those without values aside."""
    for slot in slots:
        tensor = slot.tensor
        if tensor.device != device and tensor.device.type != "meta":
            if slot.key in slot.module._parameters:
                tensor.data = tensor.data.to(device)
            else:
                slot.module._buffers[slot.key] = tensor.to(device)


def is_placeholder(tensor: Tensor) -> bool:
    """Whether it has a shape and no memory here."""
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()
