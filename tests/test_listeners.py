"""Everything that listens, and that it does not where other hosts reach it and there is no key."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.comm.network import HostNetwork
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.secret import new_secret
from shoal.server.coordinator.service import CoordinatorService, Core
from shoal.server.process.server import Server
from shoal.server.protocol.endpoint import Listener

PACKAGE = Path(__file__).parents[1] / "shoal"
LISTENING = ("listen", "create_server", "ProcessGroupGloo", "TCPStore", "init_process_group")
LISTENERS = {
    "comm/executors/elastic_nccl.py": "NCCL within one host, as in comm/select.py",
    "comm/select.py": "NCCL: Worker._check_network; Gloo within one host, in gloo_settings",
    "comm/store/service.py": "asks for a key",
    "comm/torch_backend/process_group.py": "Gloo, within one host: share_memory",
    "launch/lab/lab.py": "a socket for the StoreService of an elastic run, with its key",
    "launch/managers/ray_machines.py": "the same",
    "launch/hosts/remote.py": "the same",
    "server/protocol/endpoint.py": "TLS, or a trusted network; those who use it ask for a key",
    "comm/transport/tcp/connect.py": "HostNetwork.key",
}
NO_SECRET_HERE = {"XDG_CONFIG_HOME": "/nonexistent", "SHOAL_HOST": "10.0.0.1"}


def calls_of(path: Path) -> set[str]:
    called = [
        node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    names = [getattr(function, "attr", getattr(function, "id", "")) for function in called]
    return {name for name in names if name in LISTENING}


def test_what_listens_is_in_the_list_with_what_protects_it() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if calls_of(path)}
    assert found == set(LISTENERS)


ENTRIES: dict[str, Callable[[], object]] = {
    "server": lambda: Server("tcp:0.0.0.0:0", new_secret()),
    "second address of a server": lambda: Server(
        "tcp:127.0.0.1:0", new_secret(), None, "tcp:0.0.0.0:0"
    ),
    "coordinator": lambda: CoordinatorService(Core(), new_secret(), ["tcp:0.0.0.0:0"]),
    "listener of IPv6": lambda: Listener("tcp:[::]:0"),
    "data plane": lambda: HostNetwork(RunConfig.from_environment(NO_SECRET_HERE)).key(0),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_without_a_key_it_does_not_listen_where_other_hosts_reach_it(entry: str) -> None:
    with pytest.raises(BadInput, match=r"shoal keys new|SHOAL_TRUSTED_NETWORK=1") as refused:
        ENTRIES[entry]()
    assert str(refused.value).count(". ") == 0


SCRIPT = """
import shoal
shoal.run(lambda job: print("ran"), strategy="ddp")
"""
LAUNCHERS = {
    "four variables": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29511"},
    "torchrun": {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                 "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "none"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_PORT": "29511",
               "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_of_several_hosts_without_a_key_ends_with_one_sentence(
    launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {"PATH": "/usr/bin:/bin", "XDG_CONFIG_HOME": str(tmp_path), "MASTER_ADDR": "10.0.0.1"}
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        env={**environ, **LAUNCHERS[launcher], "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    (said,) = ended.stderr.splitlines()
    assert "without a key: make a key with `shoal keys new` and copy it to every host" in said
