"""A lab: what it is made of, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cluster.presets import load_cluster
from shoal.commands.cli import main
from shoal.errors import BadInput
from shoal.launch.lab import namespaces
from shoal.launch.lab.design import LabDesign, parse_rate
from shoal.launch.lab.lab import build_lab, find_lab, known_labs, remove_lab
from shoal.launch.lab.namespaces import CableEnd, namespaces_of, run_tool
from shoal.runtime.lab_files import LabFiles
from tests.namespaces import why_not

NAME = f"test{os.getpid() % 100_000}"
needs_root = pytest.mark.skipif(bool(why_not()), reason=why_not())
GIGABIT = 125e6


def design(hosts: int = 2, racks: int = 1, ratio: float = 1.0, mtu: int = 9000) -> LabDesign:
    return LabDesign(NAME, hosts, racks, GIGABIT, ratio, mtu)


@pytest.fixture
def removed() -> Iterator[None]:
    yield
    remove_lab(NAME)


def left() -> list[str]:
    files = LabFiles(NAME)
    paths = [files.state, files.cluster, Path(f"/etc/netns/shoal.{NAME}.h0")]
    names = [namespace.name for namespace in namespaces_of(f"shoal.{NAME}.")]
    return [*names, *(str(path) for path in paths if path.exists())]


# ------------------------------------------------------------------ without a network


@pytest.mark.parametrize(("mtu", "payload"), [(1500, 0.9415), (9000, 0.9900)])
def test_headers_and_the_gap_between_frames_take_their_part(mtu: int, payload: float) -> None:
    made = design(mtu=mtu)
    assert made.efficiency == pytest.approx(payload, abs=1e-4)
    # the kernel counts the Ethernet header, and not the 24 bytes around a frame
    assert made.counted(GIGABIT) == pytest.approx(GIGABIT * (mtu + 14) / (mtu + 38))


def test_the_cluster_has_the_links_of_the_lab() -> None:
    assert design(8, 2, 4.0).uplink_bytes_per_s == GIGABIT
    cluster = design(4, 2, 4.0).cluster()
    assert (cluster.nodes, cluster.racks, cluster.oversubscription) == (4, 2, 4.0)
    assert cluster.node.nic is not None
    assert cluster.node.nic.bytes_per_s == GIGABIT
    assert cluster.uplink_bytes_per_s == pytest.approx(2 * cluster.node.nic.rate / 4)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (LabDesign("A/b", 2, 1, GIGABIT), "is not a name for a lab"),
        (LabDesign(NAME, 65, 1, GIGABIT), "at most 64 hosts"),
        (LabDesign(NAME, 3, 2, GIGABIT), "do not fill 2 racks evenly"),
        (LabDesign(NAME, 1, 2, GIGABIT), "give at least as many --hosts as racks, not 1"),
        (LabDesign(NAME, 2, 1, GIGABIT, 4.0), "there is one rack"),
        (LabDesign(NAME, 2, 1, 1.0), "a lab has links between"),
        (LabDesign(NAME, 2, 1, GIGABIT, mtu=100), "--mtu 100"),
    ],
)
def test_a_lab_that_makes_no_sense_is_refused(bad: LabDesign, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        bad.check()


def test_a_rate_is_bits_or_bytes() -> None:
    assert parse_rate("1Gb/s") == parse_rate("125MB/s") == 125_000_000
    with pytest.raises(BadInput, match="is not a rate"):
        parse_rate("fast")


def test_without_root_or_tools_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: f"/bin/{tool}")
    assert namespaces.why_not().endswith("start it with sudo")
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    assert "install iproute2" in namespaces.why_not()


def test_a_lab_that_is_not_there_is_named() -> None:
    for find in (find_lab, lambda name: load_cluster(f"lab://{name}")):
        with pytest.raises(BadInput, match="there is no lab 'none'"):
            find("none")


# ------------------------------------------------------------------ with one


@needs_root
@pytest.mark.usefixtures("removed")
def test_links_are_shaped_both_ways_and_hosts_reach_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lab = build_lab(design(2, 2, 2.0, mtu=1500))
    assert known_labs().count(NAME) == 1
    assert find_lab(NAME) == lab
    link, uplink = (round(8 * 1514 / 1538 * rate) for rate in (GIGABIT, GIGABIT / 2))
    rack, spine = lab.switches[0], lab.spine
    assert rate_at(lab.hosts[0].namespace.name, "eth0") == pytest.approx(link, rel=1e-3)
    assert rate_at(rack.name, "h0") == pytest.approx(link, rel=1e-3)
    assert rate_at(rack.name, "uplink") == pytest.approx(uplink, rel=1e-3)
    assert rate_at(spine.name, "rack0") == pytest.approx(uplink, rel=1e-3)

    with lab.hosts[1].namespace.call(lambda: socket.create_server(("0.0.0.0", 0))) as server:
        port = server.getsockname()[1]
        address = (lab.hosts[1].address, port)
        with lab.hosts[0].namespace.call(lambda: socket.create_connection(address, 10)) as client:
            assert server.accept()[1][0] == lab.hosts[0].address
            client.close()
    assert load_cluster(f"lab://{NAME}").nodes == 2
    assert shoal("lab", "show", NAME, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(host["name"], host["rack"]) for host in shown["hosts"]] == [("h0", 0), ("h1", 1)]
    assert shown["cluster"]["racks"] == 2


@needs_root
@pytest.mark.usefixtures("removed")
def test_up_twice_says_so_and_down_ends_what_runs_in_it() -> None:
    lab = build_lab(design(1))
    with pytest.raises(BadInput, match=f"there is a lab '{NAME}' already"):
        build_lab(design(1))
    inside = lab.hosts[0].namespace.command(["sleep", "600"])
    with subprocess.Popen(inside) as process:
        while not lab.hosts[0].namespace.pids():
            assert process.poll() is None
        assert remove_lab(NAME) == 1
        assert process.wait(30) == -signal.SIGKILL
    assert not left()


@needs_root
@pytest.mark.usefixtures("removed")
def test_nothing_is_left_of_a_lab_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: CableEnd, bytes_per_s: float) -> None:
        raise namespaces.NetworkError("Specified qdisc kind is unknown.")

    monkeypatch.setattr(CableEnd, "shape", fail)
    with pytest.raises(BadInput, match="cannot have a lab: Specified qdisc kind is unknown"):
        build_lab(design(1))
    assert not left()


def killed_while_it_builds(number: signal.Signals) -> int:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        CableEnd.attach = lambda end: os.kill(os.getpid(), number)  # type: ignore
        try:
            build_lab(design(1))
        except SystemExit as end:
            os._exit(int(end.code or 0))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@needs_root
@pytest.mark.usefixtures("removed")
def test_what_a_builder_killed_half_way_leaves_is_removed_and_a_second_one_works() -> None:
    assert killed_while_it_builds(signal.SIGKILL) == -signal.SIGKILL
    assert {f"shoal.{NAME}.h0", f"shoal.{NAME}.rack0"} <= set(left())
    for act in (lambda: find_lab(NAME), lambda: build_lab(design(1))):
        with pytest.raises(BadInput, match=r"is not complete: .* shoal lab down"):
            act()
    remove_lab(NAME)
    assert not left()
    assert build_lab(design(1)) == find_lab(NAME)
    remove_lab(NAME)
    assert killed_while_it_builds(signal.SIGTERM) == 143
    assert not left()


@needs_root
@pytest.mark.usefixtures("removed")
def test_a_lab_that_is_being_built_is_neither_built_nor_removed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LabFiles(NAME).claimed({}) as is_ours:
        assert is_ours
        for act in (lambda: find_lab(NAME), lambda: build_lab(design(1))):
            with pytest.raises(BadInput, match=f"is being built by process {os.getpid()}: wait"):
                act()
        assert shoal("lab", "down", NAME) == 2
        assert f"being built by process {os.getpid()}" in capsys.readouterr().err
    assert LabFiles(NAME).builder() is None
    assert shoal("lab", "down", "--name", NAME) == 0
    assert not left()


def test_a_lab_has_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("lab", "show", "a", "--name", "b") == 2
    assert capsys.readouterr().err == "shoal: NAME is 'a' and --name is 'b': give one of them\n"
    assert shoal("lab", "show", "--name", "none") == 2
    assert "there is no lab 'none'" in capsys.readouterr().err


def shoal(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


def rate_at(namespace: str, device: str) -> float:
    """Bits a second."""
    shown = run_tool("tc", "-n", namespace, "qdisc", "show", "dev", device)
    number, unit = re.search(r"rate (\d+)([KMG]?)bit", shown).groups()  # type: ignore[union-attr]
    return float(number) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[unit]
