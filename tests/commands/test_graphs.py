"""`shoal graphs`: bytes and agreement of every graph of gossip."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from shoal.schedules.mixing import mixing_for
from tests.commands.terminal import document_of, shoal

# of 16 workers: degrees, messages of all in a step, second eigenvalue, steps to a tenth
FACTS = {
    "one-peer": ((1, 1), 16, 0.0, 4),
    "complete": ((15, 15), 240, 0.0, 1),
    "torus": ((4, 4), 64, 0.6, 5),
    "hypercube": ((4, 4), 64, 0.6, 5),
    "star": ((1, 15), 30, 0.9375, 36),
    "ring": ((2, 2), 32, 1 / 3 + 2 / 3 * np.cos(2 * np.pi / 16), 45),
}


def test_the_graphs_of_sixteen_workers(tmp_path: Path) -> None:
    picture = tmp_path / "graphs.svg"
    document = document_of("graphs", "-n", "16", "--bytes", "1MB", "--svg", str(picture))
    found = {one["graph"]: one for one in document["graphs"]}
    assert len(found) == 8 and document["left_out"] == []
    for name, (degrees, messages, eigenvalue, steps) in FACTS.items():
        one = found[name]
        assert (tuple(one["degrees"]), one["steps_to_tenth"]) == (degrees, steps)
        assert one["sent_bytes_total"] == messages * 1e6
        assert one["second_eigenvalue"] == pytest.approx(eigenvalue)
    circles = [e for e in ElementTree.parse(picture).iter() if e.tag.endswith("circle")]
    assert len(circles) == 8 * 16


@pytest.mark.parametrize("graph", ["ring", "torus", "one-peer", "star"])
def test_steps_to_a_tenth_are_those_of_replicas_that_average(graph: str) -> None:
    mixing = mixing_for(graph, 16)
    x = np.cos(2 * np.pi * np.arange(16) / 16)  # the slowest of a ring
    x -= x.mean()
    y = x
    for step in range(mixing.steps_to_tenth):
        y = mixing.at(step) @ y
    assert np.linalg.norm(y) <= 0.1001 * np.linalg.norm(x)


@pytest.mark.parametrize("words", [["-n", "16"], ["-n", "6"], ["-n", "2"], ["-n", "100"]])
def test_it_fits_80_columns(words: list[str]) -> None:
    answer = shoal("graphs", *words)
    assert answer.exit_code == 0 and "…" not in answer.stdout
    assert max(len(line.rstrip()) for line in answer.stdout.splitlines()) <= 80
