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

from shoal.errors import BadInput


class Blank:
    """The modules of a model that are still to be filled."""

    def __init__(self, model: nn.Module):
        """Take parameters off the meta device, without memory yet; tied ones stay tied."""
        self._modules: dict[int, str] = {}
        made: dict[int, nn.Parameter] = {}
        for name, module in model.named_modules():
            own = [*module._parameters.items(), *module._buffers.items()]
            if not any(t is not None and t.is_meta for _, t in own):
                continue
            if not callable(getattr(module, "reset_parameters", None)):
                raise BadInput(
                    f"{name or 'the model'} ({type(module).__name__}) was built on the meta device "
                    "and has no reset_parameters to fill it with: build the model on the CPU"
                )
            self._modules[id(module)] = name
            for key, p in module._parameters.items():
                if p is not None and p.is_meta:
                    if id(p) not in made:
                        nothing = torch.zeros((), dtype=p.dtype).expand(p.shape)
                        made[id(p)] = nn.Parameter(nothing, p.requires_grad)
                    module._parameters[key] = made[id(p)]

        for module in model.modules():  # drawn from nothing; others may take its place
            if isinstance(module, nn.modules.batchnorm._NormBase):
                self.fill(module)

    def __bool__(self) -> bool:
        return bool(self._modules)

    def fill(self, module: nn.Module) -> None:
        """Give a module memory and its start values, if it has none yet."""
        if self._modules.pop(id(module), None) is None:
            return
        for p in module._parameters.values():
            if p is not None and _is_placeholder(p):
                p.data = torch.empty(p.shape, dtype=p.dtype)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.zeros_like(buffer, device="cpu")
        module.reset_parameters()  # type: ignore[operator]

    def fill_all(self, model: nn.Module) -> None:
        for module in model.modules():
            self.fill(module)

    def fill_in_turn(self, model: nn.Module, device: torch.device) -> Iterator[list[Place]]:
        """Fill module after module, on `device`; every tensor once no other module fills it, by
        its places. Whoever lets go of a tensor there and then never has them all."""
        tensors: dict[int, list[Place]] = {}
        for place in places(model):
            tensors.setdefault(id(place.tensor), []).append(place)
        numbers = {module: number for number, module in enumerate(model.modules())}
        ready: dict[int, list[list[Place]]] = {}  # by the last module that has the tensor
        for found in tensors.values():
            ready.setdefault(max(numbers[p.module] for p in found), []).append(found)
        for module, number in numbers.items():
            self.fill(module)
            for found in ready.get(number, ()):
                _move(found, device)
                yield found


class Place(NamedTuple):
    """Where a parameter or buffer is in a model; one that is tied has several."""

    module: nn.Module
    own: str
    name: str

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.module, self.own)
        return found


def places(model: nn.Module) -> Iterator[Place]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield Place(module, own, full_name(prefix, own))


def full_name(prefix: str, own: str) -> str:
    """Of what a module, which is the model itself or has a name, calls `own`."""
    return f"{prefix}.{own}" if prefix else own


def _move(found: list[Place], device: torch.device) -> None:
    for place in found:
        tensor = place.tensor
        if tensor.device != device and tensor.device.type != "meta":
            if place.own in place.module._parameters:
                tensor.data = tensor.data.to(device)
            else:
                place.module._buffers[place.own] = tensor.to(device)


def _is_placeholder(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()
