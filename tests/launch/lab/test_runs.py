"""Runs on the hosts of a lab."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import app
from shoal.commands.cli import main, run_app
from shoal.launch.here.local import LaunchSpec
from shoal.launch.here.process_config import SINGLE_COPY
from shoal.launch.hosts.remote import run_remote
from shoal.launch.lab.design import LabDesign
from shoal.launch.lab.lab import LabMachines, build_lab, remove_lab
from shoal.runtime.config import RunConfig
from tests import scripts
from tests.launch.helpers import Screen
from tests.namespaces import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
NAME = f"runs{os.getpid() % 100_000}"
NETWORK = """
import os, socket
names = [name for _, name in socket.if_nameindex()]
print(os.environ["RANK"], os.environ["LOCAL_RANK"], names, os.environ["GLOO_SOCKET_IFNAME"],
      os.environ["SHOAL_HOST"], os.environ["MASTER_ADDR"], socket.gethostbyname("h1"))
print("id", os.environ["SHOAL_HOST_ID"].rpartition("-")[2])
"""


@pytest.fixture
def lab() -> Iterator[str]:
    build_lab(LabDesign(NAME, 4, 2, 125e6, 4.0))
    yield NAME
    remove_lab(NAME)


def test_workers_are_spread_over_hosts_that_are_apart(lab: str, tmp_path: Path) -> None:
    script = tmp_path / "network.py"
    script.write_text(NETWORK)
    screen = Screen()
    spec = LaunchSpec([sys.executable, str(script)], 5, RunConfig.from_environment())
    with LabMachines(lab) as machines:
        run_remote(machines, spec, screen)
    lines = sorted(screen.out.splitlines())
    seen = "['lo', 'eth0'] eth0"
    assert [line for line in lines if "eth0" in line] == [
        f"[0 h0] 0 0 {seen} 10.77.0.1 10.77.0.1 10.77.0.2",
        f"[1 h0] 1 1 {seen} 10.77.0.1 10.77.0.1 10.77.0.2",
        f"[2 h1] 2 0 {seen} 10.77.0.2 10.77.0.1 10.77.0.2",
        f"[3 h2] 3 0 {seen} 10.77.1.1 10.77.0.1 10.77.0.2",
        f"[4 h3] 4 0 {seen} 10.77.1.2 10.77.0.1 10.77.0.2",
    ]
    hosts = [line.split()[-1] for line in lines if "] id " in line]
    assert hosts == ["h0", "h0", "h1", "h2", "h3"]


def test_what_was_lost_starts_again_on_its_host_unless_that_is_lost(lab: str) -> None:
    over = threading.Event()
    with LabMachines(lab) as machines:
        for host in (*machines.hosts(5), *machines.server_hosts(4, SINGLE_COPY).servers):
            assert machines.replacement(host, (), over) == host
        hosts = [machines.replacement(host, {"h1"}, over) for host in machines.hosts(4)]
    assert [host.name for host in hosts] == ["h0", "h2", "h2", "h3"]


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", "ps(servers=2)", "pp(4)", "ddp + tp(2)"])
def test_hosts_give_the_result_of_one_worker(
    lab: str, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(scripts.DEEP)
    words = ["verify", "--on", f"lab://{lab}", "-n", "4", "-s", strategy, "--steps", "3"]
    with pytest.raises(SystemExit) as end:
        main([*words, str(script)])
    assert not end.value.code
    assert f"under {strategy} on 4 workers of lab://{lab}, 3 steps" in capsys.readouterr().out


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_copies_of_hot_rows_relieve_the_link_of_the_busiest_server(
    lab: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--rows", "20000", "--batch", "4096", "--share", "1e-4"]
    few += ["--rounds", "2", "--pulls", "5"]
    with pytest.raises(SystemExit) as end:
        run_app(app, "benchmarks", ["rows", "--on", f"lab://{lab}", "-n", "4", *few, "--json"])
    assert not end.value.code
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert ways["copies"]["predicted_speedup"] > 1.5
    assert ways["copies"]["max_over_mean_load"] < ways["owners"]["max_over_mean_load"] / 1.5


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kill", "status"), [((), 0), (("--kill", "2@5"), 1)])
def test_asynchronous_gossip_between_hosts_trains_and_names_a_lost_worker(
    lab: str, kill: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    words = ["run", "--on", f"lab://{lab}", "-n", "4", *kill]
    words += ["-s", 'gossip(mode="async")', "--report", str(report)]
    done = scripts.shoal(*words, "digits", "--epochs", "1", cwd=tmp_path)
    assert done.returncode == status, done.stderr
    if kill:
        assert "worker 2" in done.stderr and "was killed by SIGKILL" in done.stderr
        return
    for rank in json.loads(report.read_text())["ranks"]:
        (sync,) = rank["sync"]
        assert sync["bytes_read"] > 0 and sync["distance_to_neighbours"]
