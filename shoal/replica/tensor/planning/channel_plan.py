"""Which convolutions, linear layers and norms of a model tp splits by channels.

The forward is traced with torch.fx. A module whose forward cannot be traced needs all channels of
its inputs, and the modules inside it are traced by themselves.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from shoal.replica.attributes import attributes_kept
from shoal.replica.deferred_init import full_name
from shoal.replica.fx_tracing import ThreadTracer, tracing
from shoal.replica.tensor.layers.channels import ChannelRole, Channels
from shoal.replica.tensor.planning.channel_flow import ChannelFlow
from shoal.replica.tensor.planning.channel_groups import Activation, ChannelGroups
from shoal.replica.tensor.planning.channel_layers import is_grouped, is_matrix_layer, is_norm

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def channel_roles(
    model: nn.Module, ranks: int, may_split: Callable[[str], bool]
) -> dict[str, ChannelRole]:
    """By the names of modules. `may_split` says which of them are free to be split."""
    groups = ChannelGroups()
    flow = ChannelFlow(groups, dict(model.named_modules(remove_duplicate=False)), may_split)
    with tracing:
        for prefix, graph in _graphs(model, ""):
            flow.walk(prefix, graph)
    chosen = groups.chosen(ranks)

    def channels(value: Activation | None) -> Channels | None:
        if value is None or groups.find(value.group) not in chosen:
            return None
        return Channels(value.sizes, groups.units(value.group))

    roles = {
        name: ChannelRole(channels(flow.inputs.get(name)), channels(flow.outputs.get(name)))
        for name in {**flow.inputs, **flow.outputs}
    }
    return {name: role for name, role in roles.items() if role != ChannelRole()}


@contextmanager
def random_state_kept() -> Iterator[None]:
    """What a forward draws while it is looked at does not count."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)


def _graphs(module: nn.Module, name: str) -> Iterator[tuple[str, fx.Graph]]:
    """Graphs that have every module once, with the prefix of the names in them."""
    if _is_leaf(module):
        return
    tracer = _Tracer()
    try:
        with warnings.catch_warnings(), attributes_kept(module):
            warnings.simplefilter("ignore")
            graph = tracer.trace(module)
    except Exception:  # whatever a forward does with a stand-in for a tensor
        for child_name, child in module.named_children():
            yield from _graphs(child, full_name(name, child_name))
        return
    yield full_name(name, ""), graph
    for child_name in tracer.untraced:
        child = module.get_submodule(child_name)
        for inner_name, inner in child.named_children():
            yield from _graphs(inner, full_name(name, f"{child_name}.{inner_name}"))


class _Tracer(ThreadTracer):
    """A module whose forward cannot be traced becomes one node; `untraced` has their names."""

    def __init__(self) -> None:
        super().__init__(param_shapes_constant=True)
        self.untraced: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_leaf(m)

    def call_traced(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        last = next(iter(reversed(self.graph.nodes)), None)
        before = len(self.untraced)
        try:
            return super().call_traced(m, forward, args, kwargs)
        except Exception:  # a forward raises what it likes on proxies: then the module is a leaf
            self._erase_after(last)
            name = self.path_of_module(m)
            self.untraced[before:] = [name]
            return self.create_proxy("call_module", name, args, kwargs)

    def _erase_after(self, last: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            self.graph.erase_node(node)


def _is_leaf(module: nn.Module) -> bool:
    if is_matrix_layer(module) or is_grouped(module) or is_norm(module):
        return True
    is_torch = type(module).__module__.startswith(("torch.nn.", "shoal."))
    return is_torch and not isinstance(module, _CONTAINERS)
