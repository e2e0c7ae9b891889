"""Calls of models in a loop of the user's own: what has to be true before, and is undone after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.data.sampling import mix
from shoal.replica.context.stage import has_shards, shard_inputs
from shoal.replica.microbatch import default_generators, seed_generators
from shoal.replica.shard import ReplicaShard
from shoal.train.loop_part import LoopPart
from shoal.train.loop_proof import LoopProof


class LoopForwards:
    """Before a forward weights have to be usable; in it, random numbers are the replica's."""

    def __init__(
        self,
        mesh: Mesh,
        seed: int,
        device: torch.device,
        proof: LoopProof,
        parts: Callable[[], Sequence[LoopPart]],
    ):
        self.mesh = mesh
        self.seed = seed
        self.device = device
        self._proof = proof
        self._parts = parts
        self._calls = 0

    def watch(self, model: nn.Module, shard: ReplicaShard) -> None:
        """From now on, all calls of `model`."""
        states: list[list[Tensor]] = []
        is_alone = self.mesh.data.size == 1

        def before(module: nn.Module, inputs: Any, named: Any) -> Any:
            if self._proof.is_running:
                return None
            self._begin(module)
            self._proof.before_call(shard, inputs, named)
            if not is_alone:
                states.append([g.get_state() for g in default_generators(self.device)])
                self._seed()
            if shard.context is None or has_shards((inputs, named)):
                return None
            return shard_inputs((inputs, named), shard.context)

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if states:
                generators = default_generators(self.device)
                for generator, state in zip(generators, states.pop(), strict=True):
                    generator.set_state(state)

        model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        model.register_forward_hook(after, always_call=True)

    def _begin(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled():
            return
        for part in self._parts():
            if part.step.model is module:
                part.begin_forward()

    def _seed(self) -> None:
        self._calls += 1
        seed_generators(self.device, mix(self.seed, 7, self.mesh.data.rank, self._calls))
