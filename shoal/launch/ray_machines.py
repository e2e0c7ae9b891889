"""Nodes of a Ray cluster as the hosts of a run: `shoal run --on ray` or `--on ray://HOST:PORT`.

    driver (this process)                      node
    RayMachines ── placement group ──────────> a bundle for each worker: 1 CPU, or 1 GPU and 1 CPU
                ── an actor in each bundle ──> SlotActor; Ray restarts it elsewhere with its bundle
    RayProcess  ── start, read, kill ────────> the first actor of a node runs the agent of the host

Ray places and restarts. Tensors never pass through it: workers are processes of the agent, with
connections of their own. What an agent is given goes from this process to the actor, in a call;
Ray's tables have no part of it. Actors and placement group belong to this driver's job: Ray
removes them when it ends, however it ends.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from shoal.errors import BadInput
from shoal.launch.machines import Machine
from shoal.launch.polled_process import PolledProcess
from shoal.runtime.backoff import Backoff
from shoal.runtime.config import RunConfig, set_default_variables
from shoal.runtime.cores import cores
from shoal.runtime.run_dir import new_secret

try:
    import ray
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        AuthenticationError,
        GetTimeoutError,
        RayActorError,
        RayTaskError,
    )
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as missing:
    raise BadInput("--on ray needs Ray: pip install 'shoal[ray]'") from missing

_READ_S = 20.0  # a call of `read` that has nothing to tell returns after it
_REACH_S = 10.0
_SHORT_S = 60.0  # a cluster that is too small may be growing
_TOKEN = (
    "every node needs RAY_AUTH_MODE=token and the same token (ray get-auth-token --generate), or "
    "set RAY_AUTH_MODE=disabled for a cluster without tokens"
)


@dataclass(frozen=True)
class Slot:
    """Where Ray has placed an actor, which stands for one worker."""

    node: str
    address: str
    hostname: str
    gpus: tuple[str, ...]


class SlotActor(PolledProcess):
    """A Ray actor. Several of its methods run at once: `read` waits."""

    def where(self) -> Slot:
        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        address = str(ray.util.get_node_ip_address())
        return Slot(context.get_node_id(), address, socket.gethostname(), gpus)

    def run(self, command: Sequence[str], environ: Mapping[str, str], given: bytes) -> None:
        """The launcher's interpreter, or that of Ray where a node has it elsewhere."""
        program = command[0] if os.access(command[0], os.X_OK) else sys.executable
        self.start([program, *command[1:]], environ, given)


class RayProcess:
    """The agent of one node."""

    def __init__(self, actor: Any, on_line: Callable[[str], None]):
        self._actor = actor
        self._on_line = on_line

    def wait(self) -> int:
        returncode = None
        while returncode is None:
            try:
                lines, returncode = ray.get(self._actor.read.remote(_READ_S))
            except (RayActorError, RayTaskError):
                self._on_line("Ray cannot reach this node any more")
                return -int(signal.SIGKILL)
            for line in lines:
                self._on_line(line)
        return int(returncode)

    def terminate(self) -> None:
        self._actor.terminate.remote()

    def kill(self) -> None:
        self._actor.kill.remote()


class RayMachines:
    """Slots of a Ray cluster, reserved until the block ends."""

    is_private = False

    def __init__(self, address: str):
        self._address = address
        self._group: Any = None
        self._actors: list[Any] = []
        self._slots: list[Slot] = []  # by actor
        self._nodes: dict[str, str] = {}  # by the name of the machine
        self._config = RunConfig.from_environment()

    def __enter__(self) -> RayMachines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()

    def hosts(self, workers: int) -> Sequence[Machine]:
        """Where Ray has placed the workers; after the loss of a node, where they are since then."""
        if self._group is None:
            self._connect(workers)
            self._reserve(workers)
        self._slots = self._find_slots()
        counts = Counter(slot.node for slot in self._slots)
        names = _names({slot.node: slot.hostname for slot in self._slots})
        addresses = {slot.node: slot.address for slot in self._slots}
        self._nodes = {names[node]: node for node in counts}
        return [
            Machine(names[node], addresses[node], count, cores=count * self._cpus)
            for node, count in counts.items()
        ]

    def start(
        self,
        machine: Machine,
        command: Sequence[str],
        environ: Mapping[str, str],
        given: bytes,
        on_line: Callable[[str], None],
    ) -> RayProcess:
        node = self._nodes[machine.name]
        actors = [a for a, slot in zip(self._actors, self._slots, strict=True) if slot.node == node]
        gpus = [gpu for slot in self._slots if slot.node == node for gpu in slot.gpus]
        if gpus:
            environ = {**environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        try:
            ray.get(actors[0].run.remote(list(command), dict(environ), given))
        except RayTaskError as error:
            raise BadInput(f"{machine.name}: {error.cause}") from None
        except RayActorError:
            pass  # `wait` says that the node is lost
        return RayProcess(actors[0], on_line)

    # ------------------------------------------------------------------ the cluster

    def _connect(self, workers: int) -> None:
        """To the cluster of the address, of this host, or to one that is started here."""
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address:
            _check_reachable(self._address)
        try:
            with suppress(ConnectionError):
                ray.init(address=self._address or "auto", **quiet)
                return
            if self._address:
                raise BadInput(
                    f"there is no Ray cluster at {self._address} that this host is a node of "
                    f"(ray start --address={self._address}) and has the token of: {_TOKEN}"
                )
            set_default_variables(RAY_AUTH_TOKEN=new_secret().hex())
            num_cpus = max(cores(), workers * self._cpus)
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
        except AuthenticationError:
            raise BadInput(f"this host has no token of a Ray cluster: {_TOKEN}") from None

    def _reserve(self, workers: int) -> None:
        has_gpus = ray.cluster_resources().get("GPU", 0) >= workers
        bundle = {"CPU": self._cpus, **({"GPU": 1} if has_gpus else {})}
        self._group = placement_group([bundle] * workers, strategy="PACK")
        self._wait_for_group(workers)
        actor = ray.remote(SlotActor)
        self._actors = [
            actor.options(
                num_cpus=self._cpus,
                num_gpus=int(has_gpus),
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(workers)
        ]

    def _wait_for_group(self, workers: int) -> None:
        """For as long as others use the CPUs; not long where there are too few of them."""
        start_s = time.monotonic()
        needed = workers * self._cpus
        noticed = False
        while not self._group.wait(self._config.wait.notice_s):
            there = int(ray.cluster_resources().get("CPU", 0))
            free = int(ray.available_resources().get("CPU", 0))
            seconds = time.monotonic() - start_s
            if (there < needed and seconds > _SHORT_S) or seconds > self._limit_s:
                raise BadInput(
                    f"{workers} workers need {needed} CPUs of the Ray cluster, which has {there}, "
                    f"{free} of them free: take fewer workers, or add nodes (ray start --address=…)"
                )
            if not noticed:
                _say(f"waiting for {needed} CPUs of the Ray cluster: it has {there}, {free} free")
            noticed = True

    def _find_slots(self) -> list[Slot]:
        """Asks the actors; one that Ray has to restart elsewhere answers after that."""
        start_s = time.monotonic()
        backoff = Backoff(0.1, 2.0)
        noticed = False
        while True:
            try:
                calls = [actor.where.remote() for actor in self._actors]
                return list(ray.get(calls, timeout=self._config.wait.notice_s))
            except ActorDiedError as error:
                raise BadInput(f"Ray cannot start its actors: {_first_line(error)}") from None
            except (ActorUnavailableError, GetTimeoutError):
                seconds = time.monotonic() - start_s
            if seconds > self._limit_s:
                raise BadInput(f"Ray has not placed the workers again in {seconds:.0f} s")
            if not noticed:
                _say("waiting for Ray to place the workers")
            noticed = True
            backoff()

    @property
    def _cpus(self) -> int:
        """Which a worker reserves."""
        return self._config.num_threads or 1

    @property
    def _limit_s(self) -> float:
        return self._config.wait.limit_s or math.inf


def _names(hostnames: Mapping[str, str]) -> dict[str, str]:
    """A name for each node: that of its host, with a number where several nodes are on one."""
    counts = Counter(hostnames.values())
    names = {}
    for node, hostname in hostnames.items():
        is_alone = counts[hostname] == 1
        names[node] = hostname if is_alone else f"{hostname}-{node[:6]}"
    return names


def _check_reachable(address: str) -> None:
    """Ray itself tries for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise BadInput(f"--on ray://{address} has to name host and port: --on ray://HOST:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise BadInput(f"cannot reach a Ray cluster at {address}: {error}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
