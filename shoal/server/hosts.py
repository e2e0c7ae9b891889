"""Where the servers of a run are, and those of them that live in this process or below it.

placement    servers live in
servers      processes that `shoal run` has started (SHOAL_SERVERS, SHOAL_RUN_DIR); under
             another launcher rank 0 starts them, and they end with it
rank0        a thread of worker 0
workers      a thread of every worker
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from shoal.cores import threads_of
from shoal.errors import BadInput
from shoal.group.group import Group
from shoal.server.secret import SECRET_BYTES, fresh_secret, read_secret, write_secret
from shoal.server.server import Server
from shoal.strategy import Ps

_ENTRY_BYTES = 320
_LONGEST_SOCKET_PATH = 100
_IDLE_AFTER_FAILURE_S = 5.0


class Hosts:
    """Addresses of all servers, in order; the first one leads."""

    def __init__(self, addresses: list[str], secret: bytes):
        self.addresses, self.secret = addresses, secret
        self.server: Server | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.folder: Path | None = None

    def close(self, failed: bool = False) -> None:
        """Stop what was started here, once nobody needs it any more."""
        if self.server is not None:
            self.server.wait_idle(_IDLE_AFTER_FAILURE_S if failed else None)
            self.server.close()
            self.server = None
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        self.processes = []
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def find_hosts(part: Ps, group: Group, environ: Mapping[str, str] = os.environ) -> Hosts:
    """All ranks call it together. What has to be started is started."""
    if part.placement == "servers" and environ.get("SHOAL_SERVERS"):
        return _of_launcher(part, environ)
    secret = _share_secret(group, environ)
    one_host = len(set(tell_all(group, _host()))) == 1
    hosts = Hosts([], secret)
    own = ""
    count = group.size if part.placement == "workers" else part.servers
    if part.placement == "workers" or (part.placement == "rank0" and group.rank == 0):
        hosts.folder = _folder()
        hosts.server = Server(_listen_at(hosts.folder, 0, one_host, environ), secret)
        own = hosts.server.address
    elif part.placement == "servers" and group.rank == 0:
        hosts.folder = _folder()
        own = _start_processes(hosts, count, environ)
    said = tell_all(group, own)
    if part.placement == "workers":
        hosts.addresses = said
    else:
        hosts.addresses = said[0].split()
    return hosts


def socket_of(run_dir: str | Path, index: int) -> str:
    """Where server `index` of a run listens on this host."""
    return f"unix:{Path(run_dir) / f'server-{index}.sock'}"


def _of_launcher(part: Ps, environ: Mapping[str, str]) -> Hosts:
    """`SHOAL_SERVERS` is a number of sockets in the run directory, or addresses with commas."""
    text, secret = environ["SHOAL_SERVERS"], read_secret(environ)
    run_dir = environ.get("SHOAL_RUN_DIR", "")
    addresses = (
        [socket_of(run_dir, i) for i in range(int(text))] if text.isdigit() else text.split(",")
    )
    if secret is None:
        raise BadInput("there are servers, and no secret to show them: set SHOAL_SECRET")
    if len(addresses) < part.servers:
        raise BadInput(f"{part} wants {part.servers} servers, and {len(addresses)} are there")
    return Hosts(addresses[: part.servers], secret)


def _start_processes(hosts: Hosts, count: int, environ: Mapping[str, str]) -> str:
    assert hosts.folder is not None
    write_secret(hosts.folder, hosts.secret)
    for index in range(count):
        env = {
            **environ,
            **threads_of(count),
            "SHOAL_RUN_DIR": str(hosts.folder),
            "SHOAL_SERVERS": str(count),
            "SHOAL_SERVER_INDEX": str(index),
            "SHOAL_SERVER_PARENT": str(os.getpid()),
        }
        command = [sys.executable, "-m", "shoal.server.process"]
        hosts.processes.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL))
    return " ".join(socket_of(hosts.folder, i) for i in range(count))


def _listen_at(folder: Path, index: int, one_host: bool, environ: Mapping[str, str]) -> str:
    if one_host:
        return socket_of(folder, index)
    return f"tcp:{environ.get('SHOAL_HOST') or socket.gethostname()}:0"


def _folder() -> Path:
    """For sockets, whose paths have to be short; only this user can look into it."""
    path = tempfile.mkdtemp(prefix="shoal-ps-")
    if len(path) > _LONGEST_SOCKET_PATH - len("/server-000.sock"):
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="shoal-ps-", dir="/tmp")
    return Path(path)


def _host() -> str:
    """What this machine is called since it was started."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text().strip() if boot.is_file() else "")


def _share_secret(group: Group, environ: Mapping[str, str]) -> bytes:
    """Rank 0's: of its launcher, or a fresh one."""
    mine = (read_secret(environ) or fresh_secret()) if group.rank == 0 else b""
    tensor = torch.frombuffer(bytearray(mine.ljust(SECRET_BYTES, b"\0")), dtype=torch.uint8)
    tensor = tensor[:SECRET_BYTES].clone()
    group.broadcast(tensor).wait()
    return bytes(tensor.tolist())


def tell_all(group: Group, text: str) -> list[str]:
    """What every rank says, by rank."""
    said = text.encode()
    if len(said) > _ENTRY_BYTES:
        raise BadInput(f"the address of a server is too long: {text}")
    own = torch.frombuffer(bytearray(said.ljust(_ENTRY_BYTES, b"\0")), dtype=torch.uint8)
    everything = torch.zeros(group.size * _ENTRY_BYTES, dtype=torch.uint8)
    group.all_gather(everything, own.clone()).wait()
    rows = everything.view(group.size, _ENTRY_BYTES)
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]
