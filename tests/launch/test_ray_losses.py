"""`shoal run --on ray` on clusters that lose nodes, and get others. `make check-models` runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.ray_nodes import RayNodes
from tests.launch.ray_runs import ended, lines_until, losses, needs_ray, node_of, start

pytestmark = [needs_ray, pytest.mark.whole, pytest.mark.timeout(600)]
SERVER_BYTES = 128 << 20  # which a server reserves
ONE_EACH = {"num_cpus": 1}
# No worker and two servers; two workers and no server
FOR_SERVERS = {"num_cpus": 0, "memory": 2 * SERVER_BYTES}
FOR_WORKERS = {"num_cpus": 2, "memory": SERVER_BYTES // 2}
EXACT = ("-s", "ddp(elastic=True)")
# It saves and loads nothing itself
CHECKPOINTED = """
import os, time, torch, shoal
from functools import partial
from torch import nn

def train(job):
    torch.manual_seed(1)
    x = torch.randn(240, 8)
    step = job.step(nn.Linear(8, 3), nn.functional.cross_entropy,
                    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    losses = []
    for batch in job.batches(data, 24, epochs=4):
        losses.append(float(step(batch)))
        if len(losses) == 1:
            print("begins after", job.steps - 1, flush=True)
        if job.steps == 12:
            print("at step 12", flush=True)
        time.sleep(float(os.environ.get("PAUSE", "0")))
    if job.rank == 0:
        print("losses", losses, flush=True)

shoal.run(train)
"""


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as nodes:
        yield nodes


def bits(output: str) -> set[str]:
    """Of the weights at the end, on each worker."""
    return set(re.findall("bits ([0-9a-f]+)", output))


def test_a_killed_node_is_replaced_and_training_goes_on(tmp_path: Path, nodes: RayNodes) -> None:
    here, _ = start(tmp_path / "here", None, "-s", "ddp", EPOCHS="4").communicate()
    for _ in range(3):
        nodes.add()
    process = start(
        tmp_path / "there", nodes, "-s", "ddp", "--restart", "1", PAUSE="0.3", EPOCHS="4"
    )
    nodes.kill(node_of(lines_until(process, "saved"), "3"))
    output = ended(process, nodes)
    assert "all workers are started again (1 of 1)" in output
    goes_on = losses(output)
    assert len(goes_on) < len(losses(here))  # from the checkpoint
    assert goes_on == pytest.approx(losses(here)[-len(goes_on) :], rel=1e-4)


def test_elastic_workers_go_on_and_a_node_that_comes_is_used(
    tmp_path: Path, nodes: RayNodes
) -> None:
    for _ in range(3):
        nodes.add(**ONE_EACH)
    asked = {"EXACT": "1", "EPOCHS": "20"}
    here, _ = start(tmp_path / "here", None, *EXACT, workers=3, **asked).communicate()
    process = start(
        *(tmp_path / "there", nodes, *EXACT, "--restart", "1"),
        workers=3,
        PAUSE="0.5",
        **asked,
    )
    lines = lines_until(process, "saved", 3)
    lost = node_of(lines, "1")
    nodes.kill(lost)
    lines += lines_until(process, "saved", 2)  # by the two that are left
    nodes.add(**ONE_EACH)
    output = ended(process, nodes, lines)
    assert "it is started again (1 of 1)" in output
    assert re.search(r"worker 1 was lost .* came back after", output), output
    assert len(set(re.findall(r"^\[1 \S*-(\w+)\]", output, re.M))) == 2, output
    assert len(bits(here)) == 1 and bits(output) == bits(here), output


def test_a_replica_that_ray_has_moved_serves_alone_when_the_other_node_is_lost(
    tmp_path: Path, nodes: RayNodes
) -> None:
    first, second = (nodes.add(**FOR_SERVERS) for _ in range(2))
    nodes.add(**FOR_WORKERS)
    strategy = ("-s", "ps(servers=2, replicas=2)")
    here, _ = start(tmp_path / "here", None, *strategy, workers=2, EPOCHS="8").communicate()
    process = start(*(tmp_path / "there", nodes, *strategy), workers=2, PAUSE="1", EPOCHS="8")
    lines = lines_until(process, "saved", 2)
    nodes.add(**FOR_SERVERS)
    nodes.kill(first)
    lines += lines_until(process, "has caught up", 2)  # a replica of each shard
    nodes.kill(second)
    output = ended(process, nodes, lines)
    assert "goes on with replica" in output and output.count("starts again on") >= 2, output
    assert len(bits(here)) == 1 and bits(output) == bits(here), output
    assert losses(output) == losses(here)


@pytest.mark.parametrize(
    ("rule", "lost"),
    [("", "server"), ('mode="async", ', "worker"), ("staleness=2, ", "server")],
)
def test_a_run_that_loses_a_node_goes_on_from_the_checkpoint_of_its_servers(
    tmp_path: Path, nodes: RayNodes, rule: str, lost: str
) -> None:
    servers = [nodes.add(**FOR_SERVERS) for _ in range(2)]
    for _ in range(3):  # one takes the place of another
        nodes.add(num_cpus=1, memory=SERVER_BYTES // 2)
    strategy = ("-s", f"ps({rule}servers=2)")
    process = start(
        *(tmp_path / "there", nodes, *strategy, "--restart", "1"),
        *("--server-checkpoint", f"{tmp_path}/saved:every=5"),
        workers=2,
        script=CHECKPOINTED,
        PAUSE="0.3",
    )
    lines = lines_until(process, "at step 12", 2)
    nodes.kill(node_of(lines, "1") if lost == "worker" else servers[0])
    output = ended(process, nodes)
    assert "all workers are started again (1 of 1)" in output and ":;" not in output
    began = [int(step) for step in re.findall(r"begins after (\d+)", output)]
    assert len(began) == 2 and min(began) >= 5, output
    assert "losses" in output, output
    if not rule:  # synchronous: the losses of a run without a loss, momentum included
        assert began[0] == began[1] >= 10 and began[0] % 5 == 0, output
        alone = start(tmp_path / "here", None, *strategy, workers=2, script=CHECKPOINTED)
        assert losses(output) == losses(alone.communicate()[0])[began[0] :], output
