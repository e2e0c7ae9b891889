"""Optimizer state in the host's memory: of a chunk it is on the device while that is updated.

    copied up     1 │ 2 │ 3 │ 4 │
    updated         │ 1 │ 2 │ 3 │ 4 │
    copied down         │ 1 │ 2 │ 3 │ 4

A chunk is a run of whole parameters, updated by the same kernels as without offload: the result
has the same bits. What zero(2) and zero(3) keep of gradients, and zero(3) of parameters, comes and
goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.transport.transport import Work
from shoal.replica.flat_params import FlatParams
from shoal.replica.fsdp.sharded_params import ShardedParams
from shoal.replica.host_memory import HostCopies, host_zeros
from shoal.sync.optimizer_step import OptimizerStep, settings_of


class HostState:
    """Makes `update.optimizer.step` update the parameters of `buckets` chunk by chunk.

    `gradients` are those in the host's memory, by the number of their parameter.
    """

    def __init__(self, flat: FlatParams, update: OptimizerStep, buckets: Sequence[slice]):
        self.flat = flat
        self.update = update
        self.gradients: dict[int, Tensor] = {}
        self._chunks = [flat.params_in(bucket) for bucket in buckets]
        self._up = HostCopies(flat.device)
        self._down = HostCopies(flat.device)
        self._held: dict[tuple[int, str], Tensor] = {}  # state, by parameter and key
        optimizer = update.optimizer
        self._step = optimizer.step
        optimizer.step = MethodType(self._chunked(), optimizer)  # type: ignore[method-assign]
        for chunk in self._chunks:  # some optimizers have state from the start
            self._take_down(chunk)
        self._down.end(on_host=True)

    def tensors(self) -> list[Tensor]:
        return list(self._held.values())

    def load(self, document: dict[str, Any]) -> None:
        """`Optimizer.load_state_dict`, which would bring all state to the device at once."""
        optimizer = self.update.optimizer
        states: dict[int, dict[str, Any]] = document["state"]
        small = {
            i: {key: value for key, value in state.items() if not _is_large(value)}
            for i, state in states.items()
        }
        optimizer.load_state_dict({**document, "state": small})
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for i, state in states.items():
            optimizer.state[params[i]] = {**state, **optimizer.state[params[i]]}

    def _chunked(self) -> Callable[..., Any]:
        @wraps(self._step.__func__)  # type: ignore[attr-defined]  # schedulers mark it
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            self._update()
            return result

        return step

    def _update(self) -> None:
        settings = settings_of(self.update.optimizer)
        coming = self._bring_up(self._chunks[0]) if self._chunks else None
        for chunk, following in zip(self._chunks, [*self._chunks[1:], []], strict=True):
            came = coming
            coming = self._bring_up(following)
            assert came is not None
            came.wait()
            params = [self.flat.params[i] for i in chunk]
            if self.gradients:
                self.update.clip_by_norm(params)
            with _only(self.update.optimizer, params, settings):
                self._step()
            self._take_down(chunk)
        self._down.end(on_host=True)
        self.gradients = {}

    def _bring_up(self, chunk: Sequence[int]) -> Work:
        copies: list[tuple[Tensor, Tensor]] = []

        def copied(source: Tensor) -> Tensor:
            copies.append((torch.empty_like(source, device=self.flat.device), source))
            return copies[-1][0]

        for i in chunk:
            p = self.flat.params[i]
            gradient = self.gradients.get(i)
            if gradient is None and p.grad is None:
                continue
            if isinstance(self.flat, ShardedParams):
                p.data = copied(self.flat.held_view(i))
            if gradient is not None:
                p.grad = copied(gradient)
            state = self.update.optimizer.state.get(p, {})
            for key, value in state.items():
                if _is_large(value):
                    state[key] = copied(value)
        with self._up.beside():
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return self._up.begun()

    def _take_down(self, chunk: Sequence[int]) -> None:
        """The state of a chunk, and its parameters where they are sharded."""
        copies: list[tuple[Tensor, Tensor]] = []
        for i in chunk:
            p = self.flat.params[i]
            state = self.update.optimizer.state.get(p, {})
            for key, value in state.items():
                if _is_large(value):
                    state[key] = self._host_of(i, key, value)
                    copies.append((state[key], value))
            if isinstance(self.flat, ShardedParams):
                if p.grad is not None:
                    copies.append((self.flat.held_view(i), p.data))
                self.flat.reshard_param(i)
            if i in self.gradients:
                p.grad = None
        with self._down.beside():
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        self._down.keep([source for _, source in copies])

    def _host_of(self, i: int, key: str, value: Tensor) -> Tensor:
        held = self._held.get((i, key))
        if held is None or held.shape != value.shape or held.dtype != value.dtype:
            held = host_zeros(value.numel(), value.dtype, self.flat.device).view(value.shape)
            self._held[i, key] = held
        return held


def _is_large(value: Any) -> bool:
    """Not a step counter: such tensors stay where the optimizer has put them."""
    return isinstance(value, Tensor) and value.numel() > 1


@contextmanager
def _only(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], settings: list[dict[str, Any]]
) -> Iterator[None]:
    """The optimizer has these parameters alone, and settings as before the step: some count it."""
    groups = optimizer.param_groups
    wanted = set(map(id, params))
    whole = [group["params"] for group in groups]
    for group, before in zip(groups, settings, strict=True):
        group["params"] = [p for p in group["params"] if id(p) in wanted]
        if group["params"]:
            group.update(before)
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, members in zip(groups, whole, strict=True):
            group["params"] = members
