"""Which modules of a model are its layers: where a pipeline may be cut.

A layer is an element of an outermost nn.Sequential or nn.ModuleList (a block), or a module beside
them. A module is opened where it holds such a stack and is not itself an element of one; an
element is opened where most of its parameters are in a stack of its own (a stage of a Swin
transformer), unless that holds experts, which run side by side.

    GPT          tokens  positions  dropout  blocks.0  blocks.1 …  norm  head
    ResNet       conv1  bn1  relu  maxpool  layer1.0  layer1.1  layer2.0 …  avgpool  fc
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_MOSTLY = 0.5


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers, as `named_modules` has them; "" is the model itself."""
    found = tuple(_layers("", model, False))
    return found or ("",)


def _layers(name: str, module: nn.Module, is_element: bool) -> Iterator[str]:
    children = list(module.named_children())
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        for child_name, child in children:
            yield from _layers(_joined(name, child_name), child, True)
    elif children and _is_opened(name, module, is_element):
        for child_name, child in children:
            yield from _layers(_joined(name, child_name), child, False)
    else:
        yield name


def _is_opened(name: str, module: nn.Module, is_element: bool) -> bool:
    if not name:
        return True
    stacks = [m for n, m in module.named_modules() if _is_stack(n, m)]
    if not is_element:
        return bool(stacks)
    largest = max((_numbers(stack) for stack in stacks), default=0)
    return largest > _MOSTLY * _numbers(module)


def _is_stack(name: str, module: nn.Module) -> bool:
    """Several modules that are no leaves, one after the other."""
    if not isinstance(module, nn.Sequential | nn.ModuleList) or "expert" in name:
        return False
    return sum(1 for child in module if next(child.children(), None) is not None) > 1


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
