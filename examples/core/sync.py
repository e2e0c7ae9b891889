"""How replicas synchronize: three moments of a step, and nothing else differs between them.

    begin()          before the forward pass
    reduce(bucket)   in backward, whenever a bucket of gradients is complete
    finish()         after backward: then the weights are those of the next step

For real: shoal/sync/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from examples.core.flat import FlatModel
from examples.core.ring import execute, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from examples.core.world import World

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Sync(Protocol):
    def begin(self) -> None: ...
    def reduce(self, bucket: slice) -> None: ...
    def finish(self) -> None: ...


class Single:
    """One replica: nothing to agree on."""

    def __init__(self, flat: FlatModel, make_optimizer: MakeOptimizer) -> None:
        self.optimizer = make_optimizer(flat.parameters)

    def begin(self) -> None:
        pass

    def reduce(self, bucket: slice) -> None:
        pass

    def finish(self) -> None:
        self.optimizer.step()


class Ddp(Single):
    """Every replica has the sum of all gradients, and makes the same update.

    Gradients come weighted by their share of the global batch, so the sum is the mean.
    For real: shoal/sync/ddp.py, where a work queue exchanges while backward goes on.
    """

    def __init__(
        self, flat: FlatModel, make_optimizer: MakeOptimizer, world: World, rank: int
    ) -> None:
        super().__init__(flat, make_optimizer)
        self.flat = flat
        self.world = world
        self.rank = rank
        self.rounds = ring_all_reduce(world.size)

    def reduce(self, bucket: slice) -> None:
        execute(self.rounds, self.world, self.rank, self.flat.gradients[bucket])


class Zero1:
    """Every rank updates its chunk of each bucket, and alone holds the optimizer's state for it.

    It sends as much as ddp: an all-reduce is these two halves. For real: shoal/sync/zero.py.
    """

    def __init__(
        self, flat: FlatModel, make_optimizer: MakeOptimizer, world: World, rank: int
    ) -> None:
        self.flat = flat
        self.world = world
        self.rank = rank
        self.owned = [nn.Parameter(self._chunk(flat.values, bucket)) for bucket in flat.buckets]
        for parameter, bucket in zip(self.owned, flat.buckets, strict=True):
            parameter.grad = self._chunk(flat.gradients, bucket)
        self.optimizer = make_optimizer(self.owned)

    def _chunk(self, vector: Tensor, bucket: slice) -> Tensor:
        return vector[bucket].tensor_split(self.world.size)[self.rank]

    def begin(self) -> None:
        pass

    def reduce(self, bucket: slice) -> None:
        rounds = ring_reduce_scatter(self.world.size)
        execute(rounds, self.world, self.rank, self.flat.gradients[bucket])

    def finish(self) -> None:
        self.optimizer.step()
        rounds = ring_all_gather(self.world.size)
        for bucket in self.flat.buckets:
            execute(rounds, self.world, self.rank, self.flat.values[bucket])
