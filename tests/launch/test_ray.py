"""`shoal run --on ray`: on a Ray cluster of two nodes. `make check-models` installs Ray."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.commands.engines import open_engine
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from tests.coordinator.helpers import until
from tests.launch.ray_nodes import RayNodes, ray_nodes
from tests.launch.ray_runs import lines_until, losses, needs_ray, nothing_is_left, start


def test_without_ray_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("machines", "cluster", "slots"):
        monkeypatch.delitem(sys.modules, f"shoal.launch.ray_{name}", raising=False)
    with pytest.raises(BadInput, match=r"pip install 'shoal\[ray\]'"):
        open_engine("ray", RunConfig())


@needs_ray
@pytest.mark.whole
@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_is_not_a_head_node_is_refused_in_time(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    """It accepts connections, and is silent (None), ends them, or speaks another protocol."""
    from shoal.launch import ray_cluster

    monkeypatch.setattr(ray_cluster, "_REACH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer_once, args=(listener, answer))
        answering.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BadInput, match="does not answer as the head node of a Ray cluster"):
            ray_cluster.connect(address, 1, {})
        answering.join()


def answer_once(listener: socket.socket, answer: bytes | None) -> None:
    with listener.accept()[0] as sock:
        if answer is not None:
            sock.sendall(answer)
        else:
            while sock.recv(1024):  # until the other side gives up
                pass


@needs_ray
@pytest.mark.whole
def test_another_version_of_ray_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.launch import ray_cluster

    def init(**_: object) -> None:
        os.write(2, b"Ray warns\n")
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1\n")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    with pytest.raises(BadInput, match=r"started with: Ray: 2\.1; .* the same versions of Ray"):
        ray_cluster.connect("", 1, {})


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes() as nodes:
        nodes.add()
        nodes.add()
        yield nodes


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
    nothing_is_left(nodes)


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
    nothing_is_left(nodes)


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
    nothing_is_left(nodes)


@needs_ray
@pytest.mark.whole
def test_workers_see_the_gpus_of_their_bundles(tmp_path: Path, nodes: RayNodes) -> None:
    nodes.add(num_gpus=2)
    process = start(*(tmp_path / "there", nodes, "--device", "cuda"), workers=2, script=PRINTS_GPUS)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    shown = sorted(line.partition("gpus ")[2] for line in output.splitlines() if "gpus " in line)
    assert [line.split()[0] for line in shown] == ["0", "1"]
    assert {frozenset(line.split()[1].split(",")) for line in shown} == {frozenset("01")}
