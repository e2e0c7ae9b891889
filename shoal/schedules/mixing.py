"""Mixing matrices: which replicas average with which weights, and how fast they agree.

A step of gossip is x_i = sum over j of w[i, j] x_j, where w[i, j] is 0 unless i hears j. Rows
that add up to 1 make it an average, columns that do keep the mean of all replicas. The distance
from that mean then shrinks by the second largest eigenvalue of w (by its modulus), step by step.

    ring, torus, hypercube, star, complete    Metropolis-Hastings: 1 / (1 + the larger degree)
    exponential                               i hears i-1, i-2, i-4, …: all shares are equal
    one-peer                                  the same neighbours, but one a step: half and half
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from shoal.errors import StrategyError
from shoal.schedules.buffer_layout import MIXING_CHUNK_BYTES
from shoal.schedules.graphs import INLINE, Edge, read_edges

Matrix = NDArray[np.float64]
MAX_WORKERS = 512  # the eigenvalues of a larger matrix take longer than starting a run should
CLOSE = 1e-6


@dataclass(frozen=True, eq=False)
class Mixing:
    """The weights of each step of a period; `matrices[0][i, j]` is what i takes of j."""

    name: str
    matrices: tuple[Matrix, ...]

    @property
    def workers(self) -> int:
        return len(self.matrices[0])

    @property
    def is_uniform(self) -> bool:
        """One step makes all replicas equal."""
        return bool(np.allclose(self.matrices, 1 / self.workers, rtol=0, atol=1e-12))

    @property
    def is_mutual(self) -> bool:
        """Who hears a replica is heard by it, the same ones in every step."""
        hears = self.matrices[0] != 0
        return all(np.array_equal(hears, one.T != 0) for one in self.matrices)

    def at(self, step: int) -> Matrix:
        return self.matrices[step % len(self.matrices)]

    def heard_by(self, rank: int, step: int) -> dict[int, float]:
        """Whom `rank` averages with in a step, and what it takes of each; its own share too."""
        row = self.at(step)[rank]
        return {int(j): float(row[j]) for j in np.flatnonzero(row)}

    def listeners(self, rank: int, step: int) -> list[int]:
        """Who hears `rank` in a step, itself aside."""
        return [int(i) for i in np.flatnonzero(self.at(step)[:, rank]) if i != rank]

    @cached_property
    def _messages(self) -> tuple[int, ...]:
        """Of each worker, how many buffers the messages of all steps of a period need."""
        steps = range(len(self.matrices))
        heard = [[sorted(self.heard_by(rank, n)) for n in steps] for rank in range(self.workers)]
        return tuple(
            len({at for peers in each for at, peer in enumerate(peers) if peer != rank})
            for rank, each in enumerate(heard)
        )

    def buffer_bytes(self, rank: int | None, numel: float, width: int) -> float:
        """What a worker keeps of a tensor of so many elements: messages, and a sum; None: most."""
        chunk = MIXING_CHUNK_BYTES // width
        turns = (min(numel, chunk), min(max(0, numel - chunk), chunk))
        messages = max(self._messages) if rank is None else self._messages[rank]
        return (messages * sum(turns) + turns[0]) * width

    @cached_property
    def second_eigenvalue(self) -> float:
        """Of one step; of a period, the factor that leads to the period's when repeated."""
        product = np.linalg.multi_dot([*self.matrices[::-1], np.eye(self.workers)])
        rest = product - 1 / self.workers  # takes the eigenvalue 1 of the mean away
        symmetric = np.array_equal(product, product.T)
        values = np.linalg.eigvalsh(rest) if symmetric else np.linalg.eigvals(rest)
        largest = float(np.max(np.abs(values)))
        return 0.0 if largest < 1e-7 else largest ** (1 / len(self.matrices))

    @property
    def steps_to_tenth(self) -> int:
        """After so many steps without training, replicas are a tenth as far apart, or equal."""
        if self.second_eigenvalue == 0:
            return len(self.matrices)
        return math.ceil(math.log(10) / -math.log(self.second_eigenvalue))

    @property
    def degrees(self) -> tuple[int, int]:
        """The fewest and the most others that a worker sends to in a step."""
        heard = [len(self.listeners(rank, 0)) for rank in range(self.workers)]
        return min(heard), max(heard)

    @property
    def expectation(self) -> str:
        """How fast consensus is to be expected, in a sentence."""
        few, most = self.degrees
        number = f"{most}" if few == most else f"{few} to {most}"
        who = f"{self.name}: a worker averages with {number} other{'s' * (most > 1)} a step"
        if self.second_eigenvalue == 0:
            period = len(self.matrices)
            after = "each step" if period == 1 else f"any {period} steps"
            return f"{who}; without training replicas would be equal after {after}"
        return (
            f"{who}; second eigenvalue {self.second_eigenvalue:.3f}: without training the "
            f"distance between replicas would shrink tenfold every {self.steps_to_tenth} steps"
        )


def mixing_for(graph: str, workers: int) -> Mixing:
    """The weights of a graph over so many workers; what could not converge is refused."""
    if workers > MAX_WORKERS:
        raise StrategyError(f"gossip takes at most {MAX_WORKERS} replicas, and there are {workers}")
    if workers == 1:
        return Mixing("gossip of one", (np.ones((1, 1)),))
    if graph.startswith(INLINE) or graph.endswith((".txt", ".csv", ".edges")):
        mixing = _of_edges(read_edges(graph), graph, workers)
    else:
        mixing = _of_name(graph, workers)
    if mixing.second_eigenvalue > 1 - 1e-9:
        raise StrategyError(
            f"gossip over {mixing.name} cannot converge: its second eigenvalue is 1, so workers "
            "would swap their weights forever; let them keep a share of their own"
        )
    return mixing


Edges = tuple[NDArray[np.int64], NDArray[np.int64]]  # who sends, and who hears


@lru_cache(maxsize=16)
def edges_for(graph: str, workers: int) -> tuple[Edges, ...]:
    """Who sends to whom in each step of a period; for more workers than weights are found for."""
    if workers <= MAX_WORKERS:
        pairs = [np.nonzero(matrix) for matrix in mixing_for(graph, workers).matrices]
        return tuple((src[src != dst], dst[src != dst]) for dst, src in pairs)
    ranks = np.arange(workers)
    hops = [1 << k for k in range((workers - 1).bit_length())]
    if graph == "one-peer":
        return tuple((ranks, (ranks + hop) % workers) for hop in hops)
    is_cube = graph == "hypercube" and workers & (workers - 1) == 0
    if graph == "exponential" or is_cube:
        heard = [ranks ^ hop if is_cube else (ranks + hop) % workers for hop in hops]
        return ((np.tile(ranks, len(hops)), np.concatenate(heard)),)
    if (
        graph == "complete"
        or graph.startswith(INLINE)
        or graph.endswith((".txt", ".csv", ".edges"))
    ):
        raise StrategyError(f"gossip over the graph {graph} takes at most {MAX_WORKERS} replicas")
    one, other = np.array(_named(graph, workers)[1].edges, np.int64).T
    first = np.append(one, other)
    second = np.append(other, one)
    order = np.argsort(first, kind="stable")
    return ((first[order], second[order]),)


@lru_cache(maxsize=64)
def _of_name(graph: str, workers: int) -> Mixing:
    """Remembered: a planner asks for the same graph again and again."""
    if graph == "one-peer":
        eye = np.eye(workers)
        hops = [1 << k for k in range((workers - 1).bit_length())]
        matrices = tuple(eye / 2 + np.roll(eye, hop, axis=0) / 2 for hop in hops)
        return Mixing(f"a one-peer exponential graph of {workers}", matrices)
    name, undirected = _named(graph, workers)
    return Mixing(name, (metropolis_weights(undirected.to_directed()),))


def metropolis_weights(graph: nx.DiGraph) -> Matrix:
    """Doubly stochastic weights for a graph without weights; edges point at who hears."""
    for node in graph:
        heard = graph.out_degree(node)
        hears = graph.in_degree(node)
        if heard != hears:
            raise StrategyError(
                f"worker {node} hears {hears} others and is heard by {heard}: with as many edges "
                "in as out weights could be found, so give weights as a third column"
            )
    degree = dict(graph.in_degree())
    if any(not graph.has_edge(b, a) for a, b in graph.edges):
        degree = dict.fromkeys(degree, max(degree.values()))
    weights = np.zeros((len(graph), len(graph)))
    for source, target in graph.edges:
        weights[target, source] = 1 / (1 + max(degree[source], degree[target]))
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return weights


def _of_edges(edges: Sequence[Edge], where: str, workers: int) -> Mixing:
    name = f"the graph {where}" if len(where) < 60 else f"a graph of {len(edges)} edges"
    last = max((max(edge[:2]) for edge in edges), default=0)
    if last >= workers:
        raise StrategyError(
            f"{name} has a worker {last}, and there are {workers} replicas: 0 to {workers - 1}"
        )
    graph = nx.DiGraph()
    graph.add_nodes_from(range(workers))
    graph.add_edges_from((a, b) for a, b, weight in edges if a != b and weight != 0)
    _check_connected(graph, name)
    if edges[0].weight is None:
        return Mixing(name, (metropolis_weights(graph),))
    weights = np.zeros((workers, workers))
    for source, target, weight in edges:
        weights[target, source] = weight
    for worker in set(range(workers)) - {a for a, b, _ in edges if a == b}:
        weights[worker, worker] = max(0.0, 1 - weights[worker].sum())
    for axis, line, does in ((1, "row", "takes of"), (0, "column", "gives to")):
        sums = weights.sum(axis=axis)
        worst = int(np.argmax(np.abs(sums - 1)))
        if abs(sums[worst] - 1) > CLOSE:
            raise StrategyError(
                f"the weights of {name} are not doubly stochastic: {line} {worst}, what worker "
                f"{worst} {does} others and itself, adds up to {sums[worst]:.6g} instead of 1"
            )
    return Mixing(name, (weights,))


def _check_connected(graph: nx.DiGraph, name: str) -> None:
    if nx.is_strongly_connected(graph):
        return
    if nx.is_weakly_connected(graph):
        parts = nx.strongly_connected_components(graph)
        kind = "strongly connected"
        why = "not every one can be reached from every other, so some would never hear of the rest"
    else:
        parts = nx.weakly_connected_components(graph)
        kind = "connected"
        why = "no path leads from one to another, so each would train a model of its own"
    shown = ["{" + _shortened(nodes) + "}" for nodes in sorted(map(sorted, parts))]
    raise StrategyError(
        f"gossip over {name} cannot converge: it is not {kind}, its parts are the workers "
        f"{_shortened(shown)}; {why}"
    )


def _shortened(words: Sequence[object]) -> str:
    return ", ".join(map(str, words[:8])) + (", …" if len(words) > 8 else "")


def _named(graph: str, workers: int) -> tuple[str, nx.Graph]:
    match graph:
        case "ring":
            return f"a ring of {workers}", nx.cycle_graph(workers)
        case "torus":
            rows = max(a for a in range(1, math.isqrt(workers) + 1) if workers % a == 0)
            torus = nx.grid_2d_graph(rows, workers // rows, periodic=True)
            torus.remove_edges_from(nx.selfloop_edges(torus))  # a torus of one row is a ring
            numbered = nx.convert_node_labels_to_integers(torus, ordering="sorted")
            return f"a torus of {rows} x {workers // rows}", numbered
        case "hypercube":
            if workers & (workers - 1):
                below = 1 << workers.bit_length() - 1
                raise StrategyError(
                    f"a hypercube needs a power of two of replicas, and there are {workers}: "
                    f"take {below} or {2 * below} of them, or another graph"
                )
            bits = range(workers.bit_length() - 1)
            edges = ((i, i ^ 1 << k) for i in range(workers) for k in bits)
            return f"a hypercube of {workers}", nx.Graph(edges)
        case "exponential":
            hops = [1 << k for k in range((workers - 1).bit_length())]
            edges = ((i, (i + hop) % workers) for i in range(workers) for hop in hops)
            return f"an exponential graph of {workers}", nx.DiGraph(edges)
        case "star":
            return f"a star of {workers}", nx.star_graph(workers - 1)
        case "complete":
            return f"a complete graph of {workers}", nx.complete_graph(workers)
    return _random_regular(graph, workers)


def _random_regular(graph: str, workers: int) -> tuple[str, nx.Graph]:
    """`random-regular`, `random-regular(degree=4)`, `random-regular(degree=4, seed=7)`."""
    given = {name: int(number) for name, number in re.findall(r"(\w+)=([0-9]+)", graph)}
    degree = given.get("degree", min(workers - 1, 3 if workers % 2 == 0 else 4))
    name = f"a random {degree}-regular graph of {workers}"
    if degree >= workers or degree * workers % 2 or (degree < 2 and workers > 2):
        raise StrategyError(
            f"there is no connected graph of {workers} replicas where each has {degree} "
            "neighbours: take a degree from 2 to one less than the replicas, and one of both even"
        )
    for attempt in range(1000):  # most of them are connected
        candidate = nx.random_regular_graph(degree, workers, seed=given.get("seed", 0) + attempt)
        if nx.is_connected(candidate):
            return name, candidate
    raise StrategyError(f"{name} was not connected in 1000 attempts: take a larger degree")
