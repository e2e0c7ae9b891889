"""`shoal run --on ray`: on a Ray cluster of two nodes. `make check-models` installs Ray."""

from __future__ import annotations

import ast
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.commands.engines import open_engine
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from tests.coordinator.helpers import until
from tests.launch.ray_nodes import RayNodes, ray_nodes

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'shoal[ray]'"
)
NOTHING = {"actors": 0, "groups": 0}
SCRIPT = """
import os, time, torch, shoal
from functools import partial
from torch import nn

def train(job):
    torch.manual_seed(1)
    layers = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)]
    x = torch.randn(240, 8)
    y = (x.sum(1) > 0).long()
    step = job.step(nn.Sequential(*layers), nn.functional.cross_entropy,
                    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    losses = []
    data = torch.utils.data.TensorDataset(x, y)
    if os.path.exists("model"):
        job.load("model")
    for _ in range(int(os.environ.get("EPOCHS", "2"))):
        for batch in job.batches(data, 24):
            losses.append(float(step(batch)))
            if len(losses) == 1:
                print("training", os.getpid(), flush=True)
            time.sleep(float(os.environ.get("PAUSE", "0")))
        job.save("model")
        print("saved", flush=True)
    if job.rank == 0:
        print("losses", losses, flush=True)

shoal.run(train)
"""


def test_without_ray_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("machines", "cluster", "slots"):
        monkeypatch.delitem(sys.modules, f"shoal.launch.ray_{name}", raising=False)
    with pytest.raises(BadInput, match=r"pip install 'shoal\[ray\]'"):
        open_engine("ray", RunConfig())


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(secrets.token_hex(32)) as nodes:
        yield nodes


def start(
    folder: Path,
    nodes: RayNodes | None,
    *arguments: str,
    workers: int = 4,
    script: str = SCRIPT,
    **variables: str,
) -> subprocess.Popen[str]:
    """`shoal run` on the nodes, or on this host."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    on = [] if nodes is None else ["--on", f"ray://{nodes.address}"]
    own = {} if nodes is None else nodes.variables
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", "run", *on, "-n", str(workers), "train.py", *arguments],
        cwd=folder,
        env={
            **os.environ,
            **own,
            "SHOAL_TRUSTED_NETWORK": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(output: str) -> list[float]:
    line = next(line for line in output.splitlines() if "losses" in line)
    values: list[float] = ast.literal_eval(line.partition("losses ")[2])
    return values


def lines_until(process: subprocess.Popen[str], word: str, count: int = 4) -> list[str]:
    """Until all workers have printed it."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if sum(word in line for line in lines) == count:
            return lines
    raise AssertionError(f"the run has ended:\n{''.join(lines)}")


@needs_ray
@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["ddp", "ps(servers=2)", "ddp + pp(2)"])
def test_the_losses_are_those_of_a_run_on_this_host(
    tmp_path: Path, nodes: RayNodes, strategy: str
) -> None:
    here, _ = start(tmp_path / "here", None, "-s", strategy).communicate()
    process = start(tmp_path / "there", nodes, "-s", strategy)
    there, _ = process.communicate()
    assert process.returncode == 0, there
    assert losses(there) == pytest.approx(losses(here), rel=1e-4)
    prefixes = [line.split("]")[0] for line in there.splitlines() if "training" in line]
    assert len({prefix.split()[1] for prefix in prefixes}) == 2  # nodes
    until(lambda: nodes.state() == NOTHING, "Ray has no actor and no placement group")


@needs_ray
@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_launcher_leaves_no_worker_and_no_actor(
    tmp_path: Path, nodes: RayNodes, number: signal.Signals
) -> None:
    process = start(tmp_path / "there", nodes, "-s", "ddp", PAUSE="0.2", EPOCHS="100")
    lines = lines_until(process, "training")
    pids = [int(line.split()[-1]) for line in lines if "training" in line]
    process.send_signal(number)
    process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "workers are gone")
    until(lambda: nodes.state() == NOTHING, "Ray has no actor and no placement group")


@needs_ray
@pytest.mark.whole
def test_a_killed_node_is_replaced_and_training_goes_on(tmp_path: Path, nodes: RayNodes) -> None:
    here, _ = start(tmp_path / "here", None, "-s", "ddp", EPOCHS="4").communicate()
    nodes.add()
    process = start(
        tmp_path / "there", nodes, "-s", "ddp", "--restart", "1", PAUSE="0.3", EPOCHS="4"
    )
    lines = lines_until(process, "saved")
    last = next(line for line in lines if line.startswith("[3 "))
    nodes.kill(last.split("]")[0].rpartition("-")[2])
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "all workers are started again (1 of 1)" in output
    goes_on = losses(output)
    assert len(goes_on) < len(losses(here))  # from the checkpoint
    assert goes_on == pytest.approx(losses(here)[-len(goes_on) :], rel=1e-4)


def node_of(lines: list[str], prefix: str) -> str:
    """The first digits of the id of the node on which a process is."""
    line = next(line for line in lines if line.startswith(f"[{prefix} "))
    return line.split("]")[0].rpartition("-")[2]


@needs_ray
@pytest.mark.whole
def test_replicas_take_over_from_a_killed_node_and_training_goes_on(
    tmp_path: Path, nodes: RayNodes
) -> None:
    strategy = ("-s", "ps(servers=2, replicas=2)")
    here, _ = start(tmp_path / "here", None, *strategy, workers=2, EPOCHS="4").communicate()
    process = start(*(tmp_path / "there", nodes, *strategy), workers=2, PAUSE="0.5", EPOCHS="4")
    lines = lines_until(process, "saved", 2)
    worker = node_of(lines, "0")
    assert node_of(lines, "1") == worker  # the other node has servers alone
    nodes.kill_other(worker)
    output, _ = process.communicate()
    nodes.add()
    assert process.returncode == 0, output
    assert losses(output) == pytest.approx(losses(here), rel=1e-4)
    assert output.count("Ray cannot reach this node any more") == 2, output  # a server of each
    assert "goes on with replica" in output
    assert "starts again on" in output
    until(lambda: nodes.state() == NOTHING, "Ray has no actor and no placement group")


@needs_ray
@pytest.mark.whole
def test_without_replicas_servers_go_on_from_their_checkpoint(
    tmp_path: Path, nodes: RayNodes
) -> None:
    process = start(
        *(tmp_path / "there", nodes, "-s", "ps(servers=2)", "--restart", "1"),
        *("--server-checkpoint", f"{tmp_path}/saved:every=5"),
        workers=2,
        PAUSE="0.3",
        EPOCHS="4",
    )
    lines = lines_until(process, "saved", 2)
    nodes.kill_other(node_of(lines, "0"))
    output, _ = process.communicate()
    nodes.add()
    assert process.returncode == 0, output
    assert "; all workers are started again (1 of 1)" in output
    assert len(losses(output)) < 40, output
    until(lambda: nodes.state() == NOTHING, "Ray has no actor and no placement group")


PRINTS_GPUS = """
import os
print("gpus", os.environ["RANK"], os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


@needs_ray
@pytest.mark.whole
def test_what_a_cluster_has_no_room_for_is_refused_in_one_sentence(
    tmp_path: Path, nodes: RayNodes
) -> None:
    many = start(tmp_path / "many", nodes, workers=8)
    gpus = start(tmp_path / "gpus", nodes, "--device", "cuda", workers=2)
    late = start(tmp_path / "late", nodes, "--timeout", "3", workers=8)
    for process, says in [
        (many, "8 workers with 1 CPU each do not fit the Ray cluster: it has 2 nodes with 4 CPUs"),
        (gpus, "2 workers with 1 CPU and 1 GPU each do not fit the Ray cluster"),
        (late, "Ray has not placed 8 workers with 1 CPU each in 3 s: the Ray cluster has 2 nodes"),
    ]:
        output, _ = process.communicate()
        assert process.returncode == 2, output
        assert says in output and len(output.strip().splitlines()[-1:]) == 1
    until(lambda: nodes.state() == NOTHING, "Ray has no actor and no placement group")


@needs_ray
@pytest.mark.whole
def test_workers_see_the_gpus_of_their_bundles(tmp_path: Path, nodes: RayNodes) -> None:
    nodes.add(gpus=2)
    process = start(*(tmp_path / "there", nodes, "--device", "cuda"), workers=2, script=PRINTS_GPUS)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    shown = sorted(line.partition("gpus ")[2] for line in output.splitlines() if "gpus " in line)
    assert [line.split()[0] for line in shown] == ["0", "1"]
    assert {frozenset(line.split()[1].split(",")) for line in shown} == {frozenset("01")}
