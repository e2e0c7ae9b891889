"""`shoal explain`: who holds what, who sends what to whom, and the five steps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shoal.commands.explain import STEPS, _lanes, class_of, exchanges, five_steps
from shoal.strategy.ps_term import Ps
from shoal.strategy.strategy import as_strategy
from shoal.strategy.terms import _SYNC
from tests import scripts
from tests.commands.terminal import document_of, shoal
from tests.scripts import shoal as shoal_process


def explained(tmp_path: Path, strategy: str, workers: int, script: str = scripts.DEEP) -> Any:
    (tmp_path / "train.py").write_text(script)
    words = ("explain", "-n", str(workers), "--json", "--svg", "it.svg")
    done = shoal_process(*words, strategy, "train.py", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    ElementTree.parse(tmp_path / "it.svg")
    return json.loads(done.stdout)


def test_a_hybrid(tmp_path: Path) -> None:
    found = explained(tmp_path, "ddp + pp(2)", 4)
    assert found["class"].startswith("MPMD")
    assert [one["axes"] for one in found["workers"]] == [
        {"dp": dp, "pp": pp} for dp in (0, 1) for pp in (0, 1)
    ]
    first, second = (one["layers"] for one in found["workers"][:2])
    assert first and second and not set(first) & set(second)
    gradients, activations = found["exchanges"]
    assert (gradients["kind"], gradients["over"]) == ("all_reduce", [[0, 2], [1, 3]])
    assert (activations["kind"], activations["over"]) == ("send", [[0, 1], [2, 3]])
    # of two replicas each sends its gradients once
    assert gradients["sent_bytes"] == pytest.approx(
        max(one["parameters"] for one in found["workers"]), rel=0.25
    )
    assert found["five_steps"]["worker 3, stage 1"]["push, reduce"] == "all-reduce"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("strategy", "sent", "updates_all"),
    [
        ("ddp", [("all_reduce", 1.5)], True),
        ('ddp(compress="bf16")', [("all_to_all, all_gather", 0.75)], True),
        ("zero(1)", [("reduce", 0.75), ("broadcast", 0.75)], False),
        ("zero(3)", [("reduce", 0.75), ("all_gather twice", 1.5)], False),
        ("ps(servers=2)", [("push", 1.0), ("pull", 1.0)], True),
        ('ps(mode="async", compress="bf16")', [("push", 0.5), ("pull", 1.0)], True),
        ("gossip", [("send to neighbours", 2.0)], True),
        ("localsgd(every=4)", [("all_reduce, 1 step of 4", 1.5 / 4)], True),
        ("localsgd(every=4, fragments=2)", [("all_reduce, 2 steps of 4", 1.5 / 4)], True),
        ("mapreduce", [("reduce", 0.75), ("broadcast", 0.75)], True),
        ("hogwild", [], True),
    ],
)
def test_bytes_in_weights(
    tmp_path: Path, strategy: str, sent: list[tuple[str, float]], updates_all: bool
) -> None:
    """What each of four workers sends, in units of the weights; the small model has headers."""
    found = explained(tmp_path, strategy, 4)
    assert [one["kind"] for one in found["exchanges"]] == [kind for kind, _ in sent]
    whole = 4 * sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
    for exchange, (_, times) in zip(found["exchanges"], sent, strict=True):
        assert exchange["sent_bytes"] == pytest.approx(times * whole, rel=0.35)
        assert exchange["over"] == [[0, 1, 2, 3]]
    updates = [set(one["updates"]) for one in found["workers"]]
    assert (updates[0] == set(found["workers"][0]["layers"])) == updates_all
    assert set.union(*updates) == set(found["workers"][0]["layers"])


WIDTHS = [6, 20, 16, 18, 14, 16, 12, 18, 3]  # of scripts.DEEP


@pytest.mark.whole
@pytest.mark.parametrize(
    ("words", "axis"), [(["-n", "4", "tp(2)", "gpt"], "tp"), (["ddp + cp(2)", "gpt"], "cp")]
)
def test_splits_of_gpt(tmp_path: Path, words: list[str], axis: str) -> None:
    done = shoal_process("explain", "--json", *words, cwd=tmp_path)
    found = json.loads(done.stdout)
    inside = [one for one in found["exchanges"] if one["over"] == [[0, 1], [2, 3]]]
    assert inside and all(one["sent_bytes"] > 0 for one in inside)
    assert set(found["workers"][0]["axes"]) == {"dp", axis}


ROUTED = scripts.PLAIN.replace(
    "def train(job)",
    """class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        best, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if len(rows := (best == i).nonzero()[:, 0]):
                out[rows] = expert(x[rows])
        return self.head(out)


def train(job)""",
).replace("job.step(model()", "job.step(Routed()")


@pytest.mark.whole
def test_of_experts_that_cannot_be_traced_what_is_known_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ROUTED)
    done = shoal_process("explain", "ddp + ep(2)", "-n", "4", "--json", "train.py", cwd=tmp_path)
    (why,) = done.stderr.splitlines()
    assert done.returncode == 0 and why.startswith("what is sent inside of a replica is not known")
    found = json.loads(done.stdout)
    assert found["experts"].startswith(
        "ep(2): 1 layer of experts, 2 of 4 on each worker; they have"
    )
    assert {one["samples"] for one in found["workers"]} == {"5 of 20"}
    gradients, activations = found["exchanges"]
    held = 4 * (7 * 4 + 2 * 7 * 6 + 7 * 3)  # bytes of gate, two experts and head
    assert gradients["sent_bytes"] == pytest.approx(held, rel=0.1)
    assert activations["sent_bytes"] is None


@pytest.mark.parametrize(
    ("strategy", "times"),
    [("ddp", 1.5), ('ddp(compress="bf16")', 0.75), ("zero(3)", 0.75), ("ps", 1), ("gossip", 2)],
)
def test_bytes_between_replicas_need_no_trace(strategy: str, times: float) -> None:
    value, numel = as_strategy(strategy), 10_000_000
    stages = [{"numel": numel, "width": 4}, {"numel": 5, "width": 4}]
    sent = next(exchanges(value, 4, None, stages)).sent_bytes
    assert sent == pytest.approx(times * 4 * numel, rel=0.01)


@pytest.mark.parametrize("kind", [kind.__name__.lower() for kind in _SYNC])
def test_every_way_to_synchronize_has_five_steps(kind: str) -> None:
    for lane in five_steps(as_strategy(kind).sync_for(1)):
        assert len(lane) == len(STEPS)


@pytest.mark.parametrize(
    ("strategy", "workers", "expected"),
    [
        ("single", 1, "SPSD"),
        ("ddp", 2, "SPMD"),
        ("tp(2)", 2, "MPSD"),
        ("pp(2)", 2, "MPSD"),
        ("ddp + pp(2)", 4, "MPMD"),
        ("pp(2)", 4, "MPMD"),
    ],
)
def test_programs_and_data(strategy: str, workers: int, expected: str) -> None:
    assert class_of(as_strategy(strategy).layout(workers)) == expected


def test_all_strategies_in_one_table() -> None:
    found = {one["strategy"]: one["class"] for one in document_of("explain")["strategies"]}
    assert found["ddp"] == "SPMD" and found["ddp + pp(2)"] == "MPMD" and found["tp(2)"] == "MPSD"
    shown = shoal("explain").stdout
    assert max(map(len, shown.splitlines())) <= 80 and "Table 11.2.1" in shown


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["ddp + pp(3)", "-n", "4"], "needs a multiple of 3 workers"),
        (["dpp"], "unknown strategy 'dpp'"),
        (["ddp", "nothing.py"], "there is no script 'nothing.py' here"),
        (["--svg", "x.svg"], "--svg draws one strategy"),
    ],
)
def test_what_cannot_be_explained(words: list[str], why: str) -> None:
    answer = shoal("explain", *words)
    assert (answer.exit_code, answer.stdout) == (2, "") and why in answer.stderr


@pytest.mark.parametrize(
    ("strategy", "servers", "names"),
    [
        ("ps(servers=2)", 2, ["server 0", "server 1"]),
        ('ps(placement="rank0")', 0, ["server in worker 0"]),
        ('ps(placement="workers")', 0, ["server in worker 0", "server in worker 1"]),
    ],
)
def test_servers_have_lanes_wherever_they_are(
    strategy: str, servers: int, names: list[str]
) -> None:
    value = as_strategy(strategy)
    lanes = _lanes(value, value.layout(2), servers)
    assert list(lanes) == ["worker 0", "worker 1", *names]
    assert all(lanes[name][3] == "weights" for name in names)


def test_what_relaxed_servers_do_not_wait_for_is_said() -> None:
    assert Ps().who_waits == "" and five_steps(Ps())[1][2] == "add up"
    assert "No worker waits" in Ps(mode="async").who_waits
    assert five_steps(Ps(mode="async"))[1][2] == "each push alone"
    assert "waits for 0.75 of the workers; later pushes are dropped" in Ps(quorum=0.75).who_waits
    assert "waits where it is 2 steps ahead" in Ps(staleness=2).who_waits
