"""Graphs as text: files, one line of a strategy, and networkx."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

import shoal
from shoal.errors import StrategyError
from shoal.schedules import graphs as edges
from shoal.schedules.graphs import Edge, read_edges, write_edges
from shoal.strategy.strategy import parse


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
    with pytest.raises(StrategyError, match="No such file"):
        read_edges(str(tmp_path / "none.txt"))
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(StrategyError, match="it is no text"):
        read_edges(str(tmp_path / "odd.txt"))
    monkeypatch.setattr(edges, "MAX_FILE_BYTES", 10)
    with pytest.raises(StrategyError, match="larger than 10 bytes"):
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
