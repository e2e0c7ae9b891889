"""Decentralized training: neighbours in a graph average their weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from shoal.errors import NotBuilt, StrategyError
from shoal.strategy.base import ElasticOption, SyncTerm, Term
from shoal.strategy.options import FLAG, GRAPH, GRAPHS_OF_ANY_NUMBER, SYNC_OR_ASYNC, write


@dataclass(frozen=True, kw_only=True)
class Gossip(ElasticOption):
    """Replicas average their weights with their neighbours in a graph.

    A networkx graph is kept as text, "edges:…"; its edge attribute "weight" is what a worker
    takes of its neighbour's weights.
    """

    compared: ClassVar[tuple[str, ...]] = (
        'gossip(graph="complete")',
        'gossip(graph="ring")',
        'gossip(graph="ring", mode="async")',
    )

    graph: Annotated[str, GRAPH] = "ring"
    mode: Annotated[str, SYNC_OR_ASYNC] = "sync"
    elastic: Annotated[bool, FLAG] = False  # workers leave and join between two steps

    def _check_options(self) -> None:
        if not self.elastic:
            return
        if self.mode == "async":
            raise StrategyError(
                'gossip(mode="async") takes no elastic=True: its workers leave and come back '
                "anyway, with --restart or --elastic"
            )
        if self.graph not in GRAPHS_OF_ANY_NUMBER:
            raise StrategyError(
                f"gossip(graph={write(self.graph)}) takes no elastic=True: the graph is made again "
                f"for the workers that are left, so take one of {', '.join(GRAPHS_OF_ANY_NUMBER)}"
            )

    @property
    def lockstep(self) -> bool:
        return self.graph == "complete" and self.mode == "sync"

    equals_single = lockstep

    @property
    def needs_one_host(self) -> bool:
        return self.mode == "async"

    @property
    def survives_loss(self) -> bool:
        return self.elastic or self.mode == "async"

    takes_back = survives_loss

    def as_elastic(self) -> SyncTerm:
        return self if self.mode == "async" else super().as_elastic()

    def check(self, replicas: int) -> None:
        from shoal.schedules.mixing import mixing_for  # networkx: only where it is needed

        mixing_for(self.graph, replicas)

    def check_split(self, split: Term) -> None:
        if self.mode == "async":
            raise NotBuilt(
                f"{self} + {split} is not built yet: the workers of a replica would read the "
                "shards of a neighbor at different steps, and these are of no one model; take"
                f" {replace(self, mode='sync')} + {split}"
            )
