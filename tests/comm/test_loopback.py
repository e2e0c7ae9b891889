"""Ranks of one host: Gloo listens where only this host can connect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.runtime.config import gloo_settings
from tests.scripts import shoal

SCRIPT = """
import os
import shoal

def listening():
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")}
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{name}").readlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                yield words[1].split(":")[0]

def train(job):
    print("at", sorted(set(listening())), "of", os.environ.get("GLOO_SOCKET_IFNAME"))

shoal.run(train)
"""


def test_gloo_of_one_host_listens_at_loopback_only(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = shoal(
        "run", "-n", "2", "-s", "ddp(algorithm='ring')", "script.py",
        cwd=tmp_path, GLOO_SOCKET_IFNAME="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    at = [line.partition("at ")[2] for line in done.stdout.splitlines() if "at [" in line]
    assert at == ["['0100007F'] of lo"] * 2, done.stdout


def test_an_interface_that_the_user_has_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with gloo_settings(True):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with gloo_settings(False):
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    with gloo_settings(True):
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
