"""`shoal run --on ray`: on a Ray cluster of two nodes. `make check-models` installs Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.launch.here.running import entries, stop_run
from shoal.runtime.config import RunConfig
from tests.launch.ray_nodes import RayNodes
from tests.launch.ray_runs import (
    SCRIPT,
    ended,
    lines_until,
    losses,
    needs_ray,
    nothing_is_left,
    start,
)
from tests.server.coordinator.helpers import until

pytestmark = [needs_ray, pytest.mark.whole]
STATUSES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def test_another_version_of_ray_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.launch.managers import ray_cluster

    def init(**_: object) -> None:
        os.write(2, b"Ray warns\n")
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1\n")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    with pytest.raises(BadInput, match=r"started with: Ray: 2\.1; .* the same versions of Ray"):
        ray_cluster.connect("")


def test_a_cluster_for_one_run_leaves_no_file(tmp_path: Path) -> None:
    def of_ray() -> set[Path]:
        return {*Path("/tmp").glob("shoal-ray-*"), *Path("/tmp/ray").glob("session_2*")}

    before = of_ray()
    run = start(tmp_path / "run", None, "--on", "ray", workers=1, EPOCHS="1", RAY_ADDRESS="")
    output, _ = run.communicate()
    assert run.returncode == 0, output
    assert of_ray() <= before


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as nodes:
        nodes.add()
        nodes.add()
        yield nodes


@pytest.mark.parametrize("strategy", ["ddp", "ps(servers=2)", "ddp + pp(2)"])
def test_the_losses_are_those_of_a_run_on_this_host(
    tmp_path: Path, nodes: RayNodes, strategy: str
) -> None:
    here, _ = start(tmp_path / "here", None, "-s", strategy).communicate()
    there = ended(start(tmp_path / "there", nodes, "-s", strategy), nodes)
    assert losses(there) == pytest.approx(losses(here), rel=1e-4)
    prefixes = [line.split("]")[0] for line in there.splitlines() if "training" in line]
    assert len({prefix.split()[1] for prefix in prefixes}) == 2  # nodes


@pytest.mark.parametrize("number", STATUSES)
def test_an_interrupted_launcher_leaves_no_worker_and_no_actor(
    tmp_path: Path, nodes: RayNodes, number: signal.Signals
) -> None:
    strategy = "ps(servers=2)" if number == signal.SIGTERM else "ddp"
    process = start(tmp_path / "there", nodes, "-s", strategy, PAUSE="0.2", EPOCHS="100")
    lines = lines_until(process, "training")
    pids = [int(line.split()[-1]) for line in lines if "training" in line]
    process.send_signal(number)
    process.communicate()
    assert process.returncode == STATUSES[number]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "workers are gone")
    nothing_is_left(nodes)


@pytest.mark.parametrize("number", STATUSES)
def test_a_launcher_that_ends_while_ray_places_workers_leaves_nothing(
    tmp_path: Path, nodes: RayNodes, number: signal.Signals
) -> None:
    waits = start(tmp_path / "waits", nodes, "--timeout", "600", workers=8, SHOAL_WAIT_NOTICE="0.5")
    assert waits.stdout is not None
    assert "waiting for Ray to place 8 workers with 1 CPU each: the Ray" in waits.stdout.readline()
    waits.send_signal(number)
    waits.communicate()
    assert waits.returncode == STATUSES[number]
    nothing_is_left(nodes)


IN_A_FOLDER = """
import sys
from local_module import WIDTH
{rest}
""".replace("{rest}", SCRIPT.replace("def train(job):", "def train(job):\n    print(sys.argv)"))


def test_a_script_of_another_folder_is_shown_logged_and_stopped_and_stores_no_tensor_in_ray(
    tmp_path: Path, nodes: RayNodes
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "local_module.py").write_text("WIDTH = 1\n")
    (project / "other.py").write_text(IN_A_FOLDER)
    process = start(
        *(tmp_path / "there", nodes, "-s", "ddp", "--logs", str(tmp_path / "logs")),
        script_file=f"{project}/other.py",
        script_arguments=("--epochs", "3"),
        WIDTH="20000",  # 3 MB of parameters; a value of more than 100 KB would be in the store
        EPOCHS="1000",
    )
    lines = lines_until(process, "training")
    assert sum("other.py', '--epochs', '3']" in line for line in lines) == 4, lines
    assert [nodes.stored_bytes() for _ in range(20)] == [0] * 20
    (entry,) = [entry for entry in entries() if entry.launcher_pid == process.pid]
    assert len(set(entry.hosts)) == 2 and entry.workers == 4
    until(lambda: (entry.steps or 0) > 0, "the launcher knows the step of a worker")
    assert stop_run(entry, now=False, limit_s=60)[0]
    process.communicate()
    assert process.returncode == 143
    logs = {file.name: file.read_text() for file in (tmp_path / "logs").iterdir()}
    assert sum("training" in text for text in logs.values()) == 4, logs
    nothing_is_left(nodes)


def test_an_address_of_ray_client_is_refused_in_one_sentence() -> None:
    from shoal.launch.managers import ray_cluster

    environ = {"RAY_ADDRESS": "ray://10.0.0.1:10001"}
    with pytest.raises(BadInput, match="Ray Client lends no hosts"):
        ray_cluster.connected("", 1, environ).__enter__()


def test_servers_that_a_cluster_has_no_memory_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shoal.launch.managers import ray_cluster, ray_machines

    monkeypatch.setattr(ray_cluster.ray, "available_resources", lambda: {"memory": 3 << 20})
    nodes = [ray_cluster.RayNode("1", "h1", {"CPU": 2, "memory": 100 << 20})]
    machines = ray_machines.RayMachines("", RunConfig())
    says = "2 servers with 128 MiB of memory each .* 100 MiB of memory .3 MiB free., which is room"
    with pytest.raises(BadInput, match=says):
        machines._check_room(2, "server", {"memory": 128 << 20}, nodes)


PRINTS_GPUS = """
import os
print("gpus", os.environ["RANK"], os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


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
    nothing_is_left(nodes)


def test_workers_see_the_gpus_of_their_bundles(tmp_path: Path, nodes: RayNodes) -> None:
    nodes.add(num_gpus=2)
    process = start(*(tmp_path / "there", nodes, "--device", "cuda"), workers=2, script=PRINTS_GPUS)
    output = ended(process, nodes)
    shown = sorted(line.partition("gpus ")[2] for line in output.splitlines() if "gpus " in line)
    assert [line.split()[0] for line in shown] == ["0", "1"]
    assert {frozenset(line.split()[1].split(",")) for line in shown} == {frozenset("01")}
