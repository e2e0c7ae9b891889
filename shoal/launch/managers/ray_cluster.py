"""A Ray cluster: how this process joins it, and what it has."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import BadInput
from shoal.runtime.config import set_default_variables
from shoal.runtime.files import scratch_folder
from shoal.runtime.memory_limit import cores
from shoal.runtime.secret import new_secret

try:
    import ray
    from ray.exceptions import AuthenticationError
except ImportError as missing:
    raise BadInput("--on ray needs Ray: pip install 'shoal[ray]'") from missing

_REACH_S = 10.0
_HEAD = "node:__internal_head__"  # a resource that the head node alone has
_TOKEN = (
    "every node needs RAY_AUTH_MODE=token and the same token (ray get-auth-token --generate), or "
    "set RAY_AUTH_MODE=disabled for a cluster without tokens"
)
_FOLDER = "/tmp"  # a path that is short enough for the sockets of Ray
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
Bundle = Mapping[str, float]  # resources by their name


@contextmanager
def connected(address: str, num_cpus: int, environ: Mapping[str, str]) -> Iterator[None]:
    """To the cluster of the address, of this host, or to one that is started here for the block."""
    with ExitStack() as block:
        block.callback(leave)
        if not connect(_address_in(environ, address)):
            folder = block.enter_context(scratch_folder("ray", _FOLDER))
            block.callback(leave)  # before its folder is removed
            _start_cluster(max(cores(), num_cpus), folder)
        yield


def _address_in(environ: Mapping[str, str], address: str) -> str:
    """RAY_ADDRESS, as for all of Ray, where --on names none."""
    named = environ.get("RAY_ADDRESS", "")
    if address or named in ("auto", "local"):
        return address
    if "://" in named:
        raise BadInput(
            f"RAY_ADDRESS={named} is not the address of a head node, and Ray Client lends no hosts:"
            " set HOST:6379, or leave it out and give --on ray://HOST:6379"
        )
    return named


def connect(address: str) -> bool:
    """False where no address is given, and this host is no node of a cluster."""
    # At the loss of a node Ray prints the log of its raylet. No option prevents it; its debugger
    # uses this, too
    ray._private.worker._worker_logs_enabled = False
    if address:
        _check_reachable(address)
    try:
        with suppress(ConnectionError), _quietly():
            ray.init(address=address or "auto", **_QUIET)
            return True
        if address:
            raise BadInput(
                f"there is no Ray cluster at {address} that this host is a node of "
                f"(ray start --address={address}) and has the token of: {_TOKEN}"
            )
        return False
    except AuthenticationError:
        where = f"at {address}" if address else "that runs on this host"
        other = "" if address else "; --on ray://HOST:6379 takes another cluster"
        raise BadInput(
            f"the Ray cluster {where} asks for a token that is not here: {_TOKEN}{other}"
        ) from None
    except RuntimeError as error:  # other versions, or no node here
        why = " ".join(str(error).split()).rstrip(".")
        raise BadInput(
            f"Ray does not connect to the cluster: {why}; this host has to be a node of it (ray "
            "start --address=…), with the same versions of Ray and Python"
        ) from None


def _start_cluster(num_cpus: int, folder: Path) -> None:
    """On this host, until this process leaves it."""
    set_default_variables(RAY_AUTH_TOKEN=new_secret().hex())
    try:
        with _quietly():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                _temp_dir=str(folder / "ray"),  # Ray lets all users write there
                **_QUIET,
            )
    except Exception as error:  # Ray has no class for a node that does not start in 30 s
        why = " ".join(str(error).split()).rstrip(".")
        raise BadInput(f"Ray cannot start a cluster on this host: {why}") from None


@contextmanager
def _quietly() -> Iterator[None]:
    """For `ray.init`: without the warnings of its native code, and with the caller's SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    sys.stderr.flush()
    shown = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    except SystemExit:  # of the handler that Ray sets, which ends with other statuses
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        if is_main:
            signal.signal(signal.SIGTERM, handler)


def own_address() -> str:
    """By which other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


def leave() -> None:
    """Also ends a cluster that was started here."""
    if ray.is_initialized():
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself tries for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadInput(f"--on ray://{address} has to name host and port: --on ray://HOST:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except OSError as error:
        raise BadInput(f"cannot reach a Ray cluster at {address}: {error}") from None


@dataclass(frozen=True)
class RayNode:
    """What a node of the cluster has, used or not."""

    node_id: str
    hostname: str
    resources: Bundle

    @property
    def is_head(self) -> bool:
        return _HEAD in self.resources

    def room_for(self, bundle: Bundle) -> int:
        """How many such bundles fit where nothing else runs."""
        return min(math.floor(self.resources.get(name, 0) / n) for name, n in bundle.items())


def nodes_now() -> list[RayNode]:
    """Those that live."""
    found: list[dict[str, Any]] = ray.nodes()
    return [
        RayNode(node["NodeID"], node["NodeManagerHostname"], node["Resources"])
        for node in found
        if node["Alive"]
    ]


def room_for(nodes: Sequence[RayNode], bundle: Bundle) -> int:
    return sum(node.room_for(bundle) for node in nodes)


def head_bundle(memory_bytes: int) -> Bundle:
    """On the head node, without which there is no cluster."""
    return {"memory": memory_bytes, _HEAD: 0.001}


def idle_head(nodes: Sequence[RayNode]) -> str | None:
    """The head node, where it was started without CPUs: nothing is to run there."""
    heads = [node.node_id for node in nodes if node.is_head and not node.resources.get("CPU")]
    return heads[0] if heads and len(nodes) > 1 else None


def resources_in_words(nodes: Sequence[RayNode], bundle: Bundle) -> str:
    """ "2 nodes with 4 CPUs (1 free) and 0 GPUs": CPUs, GPUs, and what else the bundle has.

    Nodes without CPUs are counted only where the bundle needs none.
    """
    free = ray.available_resources()
    useful = [node for node in nodes if "CPU" not in bundle or node.resources.get("CPU")]
    count = f"{len(useful)} node{'' if len(useful) == 1 else 's'}"
    amounts = []
    for name in {"CPU": 0, "GPU": 0, **bundle}:
        if name == _HEAD:
            continue
        total = sum(node.resources.get(name, 0) for node in useful)
        left = f" ({_number(name, free.get(name, 0))} free)" if total else ""
        amounts.append(f"{_amount(name, total)}{left}")
    return f"{count} with {_joined(amounts)}"


def bundle_in_words(bundle: Bundle) -> str:
    return _joined([_amount(name, n) for name, n in bundle.items() if name != _HEAD])


def _amount(name: str, n: float) -> str:
    if name == "memory":
        return f"{_number(name, n)} of memory"
    return f"{_number(name, n)} {name}{'' if n == 1 else 's'}"


def _number(name: str, n: float) -> str:
    return f"{n / (1 << 20):.0f} MiB" if name == "memory" else str(int(n))


def _joined(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
