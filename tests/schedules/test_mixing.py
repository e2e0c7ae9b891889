"""The weights of gossip: doubly stochastic, connected, and as fast as their eigenvalue says."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.errors import BadInput, StrategyError
from shoal.schedules import graphs as edges
from shoal.schedules import mixing
from shoal.schedules.graphs import Edge, read_edges, write_edges
from shoal.schedules.mixing import Mixing, edges_for, mixing_for
from shoal.strategy.options import GRAPHS
from shoal.strategy.strategy import parse
from shoal.strategy.terms import gossip


def assert_doubly_stochastic(mixing: Mixing) -> None:
    for weights in mixing.matrices:
        assert weights.min() >= 0
        np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)


@given(graph=st.sampled_from(GRAPHS), workers=st.integers(1, 40))
@settings(deadline=None)
def test_every_named_graph_is_doubly_stochastic_and_converges(graph: str, workers: int) -> None:
    if graph == "hypercube":
        workers = 1 << workers % 7
    mixing = mixing_for(graph, workers)
    assert mixing.workers == workers
    assert_doubly_stochastic(mixing)
    assert mixing.second_eigenvalue < 1


@given(seed=st.integers(0, 10_000), workers=st.integers(3, 30))
@settings(deadline=None)
def test_so_is_any_connected_graph(seed: int, workers: int) -> None:
    graph = nx.gnp_random_graph(workers, 0.3, seed=seed)
    graph.add_edges_from(nx.path_graph(workers).edges)
    assert_doubly_stochastic(mixing_for(write_edges(graph), workers))


@given(hops=st.sets(st.integers(1, 9), min_size=1), workers=st.integers(10, 20))
@settings(deadline=None)
def test_so_is_a_directed_graph_with_as_many_edges_in_as_out(hops: set[int], workers: int) -> None:
    graph = nx.DiGraph((i, (i + hop) % workers) for i in range(workers) for hop in {1, *hops})
    assert_doubly_stochastic(mixing_for(write_edges(graph), workers))


def test_metropolis_hastings_on_a_path_of_three() -> None:
    """The one in the middle has two neighbours, so edges weigh 1/3."""
    [weights] = mixing_for("edges:0-1,1-2", 3).matrices
    third = 1 / 3
    expected = [[2 * third, third, 0], [third, third, third], [0, third, 2 * third]]
    np.testing.assert_allclose(weights, expected)


def test_one_peer_takes_half_of_another_one_each_step() -> None:
    mixing = mixing_for("one-peer", 4)
    heard = [mixing.heard_by(3, step) for step in range(3)]
    assert heard == [{3: 0.5, 2: 0.5}, {3: 0.5, 1: 0.5}, {3: 0.5, 2: 0.5}]
    assert [mixing.listeners(3, step) for step in range(2)] == [[0], [1]]


@pytest.mark.parametrize(
    ("graph", "workers", "expected"),
    [
        ("ring", 8, 1 / 3 + 2 / 3 * np.cos(2 * np.pi / 8)),
        ("torus", 16, 1 / 5 + 4 / 5 * (1 + np.cos(np.pi / 2)) / 2),
        ("hypercube", 16, 1 - 2 / 5),
        ("exponential", 16, 3 / 5),  # (log n - 1) / (log n + 1)
        ("star", 10, 1 - 1 / 10),
        ("complete", 7, 0.0),
        ("one-peer", 16, 0.0),
    ],
)
def test_second_eigenvalues_are_the_known_ones(graph: str, workers: int, expected: float) -> None:
    assert mixing_for(graph, workers).second_eigenvalue == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("graph", GRAPHS)
def test_repeated_mixing_contracts_by_the_second_eigenvalue(graph: str) -> None:
    """Without gradients; over whole periods, from a random start, after the first ones."""
    mixing = mixing_for(graph, 16)
    x = np.random.RandomState(0).randn(16, 50)
    mean = x.mean(axis=0)
    distances = []
    for step in range(30 * len(mixing.matrices)):
        x = mixing.at(step) @ x
        distances.append(np.linalg.norm(x - x.mean(axis=0)))
    np.testing.assert_allclose(x.mean(axis=0), mean, atol=1e-12)
    if mixing.second_eigenvalue == 0:
        assert distances[len(mixing.matrices) - 1] < 1e-12
        return
    rate = (distances[-1] / distances[9]) ** (1 / (len(distances) - 10))
    assert rate == pytest.approx(mixing.second_eigenvalue, rel=0.02)


def test_equal_weights_are_noticed_whatever_the_graph_is_called() -> None:
    assert mixing_for("complete", 5).is_uniform and mixing_for("ring", 3).is_uniform
    assert not mixing_for("ring", 4).is_uniform
    assert not mixing_for("one-peer", 4).is_uniform


@pytest.mark.parametrize(
    ("graph", "workers", "sentence"),
    [
        ("edges:0>1,1>2,2>1", 3, r"not strongly connected, its parts are the workers \{0\}, \{1, "),
        ("edges:0-1", 3, r"not connected, its parts are the workers \{0, 1\}, \{2\}; no path"),
        ("edges:0-1:0,1-2:0.5", 3, r"its parts are the workers \{0\}, \{1, 2\}"),
        ("edges:0-1,1-2", 2, "has a worker 2, and there are 2 replicas: 0 to 1"),
        ("edges:0>1,1>2,2>0,0>2", 3, "worker 0 hears 1 others and is heard by 2"),
        ("edges:0-1:0.5,1-2:0.6", 3, "row 1, what worker 1 takes of others.* adds up to 1.1"),
        ("edges:0>1:0.5,1>2:0.5,2>0:0.25", 3, "column 0, what worker 0 gives to .* 1.25 instead"),
        ("edges:0-1:0.5,1-1:0.4", 2, "row 1, .* adds up to 0.9 instead of 1"),
        ("edges:0-1:1", 2, "its second eigenvalue is 1"),
        ("hypercube", 6, "a power of two of replicas, and there are 6: take 4 or 8"),
        ("random-regular(degree=3)", 5, "no connected graph of 5 replicas where each has 3"),
        ("random-regular(degree=1)", 4, "no connected graph of 4 replicas where each has 1"),
        ("complete", 513, "at most 512 replicas"),
    ],
)
def test_what_cannot_converge_is_refused(graph: str, workers: int, sentence: str) -> None:
    with pytest.raises(StrategyError, match=sentence):
        gossip(graph=graph).check(workers)


def test_more_replicas_than_weights_are_found_for_can_be_priced_and_not_run() -> None:
    gossip(graph="ring").check(513)
    with pytest.raises(StrategyError, match="at most 512 replicas"):
        mixing_for("ring", 513)


@pytest.mark.parametrize("graph", ["ring", "torus", "exponential", "one-peer", "hypercube"])
def test_edges_of_many_replicas_are_those_of_their_weights(
    graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pairs() -> list[set[tuple[int, int]]]:
        edges_for.cache_clear()
        return [set(zip(*map(np.ndarray.tolist, one), strict=True)) for one in edges_for(graph, 64)]

    expected = pairs()
    monkeypatch.setattr(mixing, "MAX_WORKERS", 8)
    assert pairs() == expected
    edges_for.cache_clear()


def test_given_weights_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "weights.csv"
    path.write_text("0 > 1 0.5\n1 > 2 0.5\n2 > 0 0.5\n")
    [weights] = mixing_for(str(path), 3).matrices
    np.testing.assert_array_equal(weights, [[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]])


def test_a_random_regular_graph_depends_on_its_seed_alone() -> None:
    one, again, other = (
        mixing_for(f"random-regular(degree=3, seed={seed})", 16).matrices[0] for seed in (1, 1, 2)
    )
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    assert set((one > 0).sum(axis=0)) == {4}


def test_a_torus_is_as_square_as_can_be() -> None:
    assert mixing_for("torus", 12).name == "a torus of 3 x 4"
    assert mixing_for("torus", 7).name == "a torus of 1 x 7"
    assert np.allclose(mixing_for("torus", 7).matrices[0], mixing_for("ring", 7).matrices[0])


def from_file(tmp_path: Path, text: str) -> list[Edge]:
    path = tmp_path / "graph.txt"
    path.write_text(text)
    return read_edges(str(path))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# a path\n0 1   # the first\n\n1,2\n", "0>1 1>0 1>2 2>1"),
        ("0 1 0.25", "0>1:0.25 1>0:0.25"),  # of both directions
        ("0,1,0.25\n1,0,0.5", "0>1:0.25 1>0:0.5"),  # each has a line of its own
        ("0 > 1 0.5\n1>0 1e-3", "0>1:0.5 1>0:0.001"),
    ],
)
def test_a_file_has_an_edge_a_line(tmp_path: Path, text: str, found: str) -> None:
    edges = from_file(tmp_path, text)
    words = [f"{a}>{b}" + ("" if weight is None else f":{weight}") for a, b, weight in edges]
    assert sorted(words) == found.split()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0 1\n1 x\n", "line 2 of"),
        ("0 1 2 3\n", "line 1 of"),
        ("0 -1\n", "line 1 of"),
        ("0 1 nan\n", "line 1 of"),
        ("9999999 1\n", "line 1 of"),
        ("0 1 0.5\n1 2\n", "some edges have a weight and some have none"),
        ("0 1\n0 1\n", "the edge from 0 to 1 is given twice"),
    ],
)
def test_a_line_that_is_no_edge_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(StrategyError, match=sentence):
        from_file(tmp_path, text)


def test_a_file_that_cannot_be_read_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_edges(str(tmp_path / "none.txt"))
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(StrategyError, match="is no text"):
        read_edges(str(tmp_path / "odd.txt"))
    monkeypatch.setattr(edges, "MAX_FILE_BYTES", 10)
    with pytest.raises(BadInput, match="more than 0 KiB"):
        from_file(tmp_path, "0 1\n" * 10)


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (nx.path_graph(3), "edges:0-1,1-2"),
        (nx.DiGraph([(0, 1), (1, 0)]), "edges:0>1,1>0"),
        (nx.grid_2d_graph(2, 2), "edges:0-2,0-1,1-3,2-3"),
        (nx.Graph([(1, 0, {"weight": 0.25})]), "edges:1-0:0.25"),
    ],
)
def test_a_networkx_graph_has_a_text_form_that_reads_back(graph: nx.Graph, text: str) -> None:
    assert write_edges(graph) == text
    part = shoal.gossip(graph=graph)
    assert str(part) == f'gossip(graph="{text}")'
    assert parse(str(part)).sync == part


LONELY = nx.path_graph(2)
LONELY.add_node(2)


@pytest.mark.parametrize(
    ("graph", "sentence"),
    [
        (LONELY, "node 2 of the graph has no edge"),
        (nx.MultiGraph([(0, 1)]), "no multigraph"),
        (nx.complete_graph(100), "write it to a file"),
        *(
            (nx.Graph([(0, 1, {"weight": weight})]), "weights of a graph are numbers from 0 to 1")
            for weight in (-0.5, float("nan"), "heavy")
        ),
    ],
)
def test_graphs_without_a_text_form_are_refused(graph: nx.Graph, sentence: str) -> None:
    with pytest.raises(StrategyError, match=sentence):
        shoal.gossip(graph=graph)


@pytest.mark.parametrize("text", ["edges:", "edges:0", "edges:0-", "edges:0-1,", "edges:a-b"])
def test_edges_in_a_strategy_are_checked(text: str) -> None:
    with pytest.raises(StrategyError, match="graph must be one of ring, torus"):
        parse(f'gossip(graph="{text}")')
