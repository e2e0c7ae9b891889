"""Nodes of a Ray cluster as the hosts of a run: `shoal run --on ray` or `--on ray://HOST:PORT`.

    driver (this process)                      node
    RayMachines ── placement group, PACK ────> a bundle for each worker: 1 CPU, or 1 GPU and 1 CPU
                ── placement group, SPREAD ──> a bundle for each server; a group for each shard
                                               with replicas, and for the coordinator
                ── an actor in each bundle ──> SlotActor; Ray restarts it elsewhere with its bundle
    RayProcess  ── start, read, kill ────────> the first actor of a node runs the agent of the
                                               host, each actor of a server that of its server

Ray places and restarts. Tensors never pass through it: workers and servers are processes of
agents, with connections of their own. What an agent is given goes from this process to the actor,
in a call; Ray's tables have no part of it. Actors and placement groups belong to this driver's
job: Ray removes them when it ends, however it ends.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from shoal.errors import BadInput
from shoal.launch.here.process_config import Replication
from shoal.launch.hosts.machines import HostProgram, Machine, ServerHosts
from shoal.launch.managers.ray_cluster import (
    Bundle,
    RayNode,
    bundle_in_words,
    connected,
    head_bundle,
    idle_head,
    nodes_now,
    own_address,
    resources_in_words,
    room_for,
)
from shoal.launch.managers.ray_slots import RayProcess, Slot, SlotGroup
from shoal.runtime.config import RunConfig
from shoal.runtime.preemption import ending_by_exception
from shoal.runtime.waits import Backoff
from shoal.runtime.wording import counted, say

_BACKLOG = 1024
_INTERRUPTIBLE_S = 0.5  # Ctrl-C does not end a wait inside Ray
_WORKER = "worker "  # begins what `reserved` says of the actor of one worker
_SERVER_BYTES = 128 << 20
_SERVER: Bundle = {"memory": _SERVER_BYTES}  # which it reserves; its CPUs are those of workers
_Found = TypeVar("_Found")


class RayMachines:
    """Slots of a Ray cluster, reserved until the block ends."""

    is_private = False

    def __init__(self, address: str, config: RunConfig):
        self._address = address
        self._config = config
        self._workers: SlotGroup | None = None
        self._servers: list[SlotGroup] = []
        self._slots: list[Slot] = []  # of the workers' actors
        self._nodes: dict[str, str] = {}  # by the name of the machine
        self._known: list[RayNode] = []
        self._running: dict[int, RayProcess] = {}  # agents, by the worker's actor
        self._replacing = threading.Lock()
        self._promised: set[int] = set()  # actors that `replacement` has chosen
        self._block = ExitStack()

    def __enter__(self) -> RayMachines:
        self._block.enter_context(ending_by_exception())
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            for group in (self._workers, *self._servers):
                if group is not None:
                    group.release()
        finally:
            self._block.__exit__(*raised)

    def hosts(self, workers: int) -> Sequence[Machine]:
        """Where Ray has placed the workers; after the loss of a node, where they are since then."""
        if self._workers is None:
            num_cpus = workers * self._cpus
            self._block.enter_context(connected(self._address, num_cpus, self._config.environ))
            self._known = nodes_now()
            bundle = self._bundle_of_worker(workers)
            self._check_room(workers, "worker", bundle, self._known)
            self._workers = SlotGroup([bundle] * workers, "PACK")
            self._reserve(self._workers, _asked(workers, "worker", bundle))
        self._slots = self._find(self._workers, "the workers")
        counts = Counter(slot.node for slot in self._slots)
        self._nodes = {self._name(slot): slot.node for slot in self._slots}
        return [
            Machine(name, self._address_of(node), counts[node], counts[node] * self._cpus)
            for name, node in self._nodes.items()
        ]

    def server_hosts(self, servers: int, replication: Replication) -> ServerHosts:
        if not self._servers:
            nodes = nodes_now()
            not_on = idle_head(nodes)
            useful = [node for node in nodes if node.node_id != not_on]
            self._check_room(servers, "server", _SERVER, useful)
            for bundles in _bundles_of_servers(servers, replication):
                self._servers.append(SlotGroup(bundles, "SPREAD", not_on))
            for group in self._servers:
                self._reserve(group, _asked(servers, "server", _SERVER))
        found = [
            self._server_machine(number, index, slot)
            for number, group in enumerate(self._servers)
            for index, slot in enumerate(self._find(group, "the servers"))
        ]
        return ServerHosts(tuple(found[:servers]), found[-1] if replication.is_on else None)

    def listen(self) -> socket.socket:
        return socket.create_server((own_address(), 0), backlog=_BACKLOG)

    def replacement(
        self, machine: Machine, lost: Collection[str], over: threading.Event
    ) -> Machine:
        """Where Ray has restarted the actor of a server, or one of a lost node, with its bundle."""
        if machine.reserved and not machine.reserved.startswith(_WORKER):
            number, index = map(int, machine.reserved.split(":"))
            slot = self._servers[number].find(index, over)
            return machine if slot is None else self._server_machine(number, index, slot)
        assert self._workers is not None
        gone = {node for name, node in self._nodes.items() if name in lost}
        with self._replacing:
            there = [i for i, slot in enumerate(self._slots) if slot.node in gone]
            index = min(set(there) - self._promised, key=lambda i: not self._is_free(i))
            self._promised.add(index)
        slot = self._workers.find(index, over)
        if slot is None:
            raise BadInput("the run has ended")
        self._slots[index] = slot
        name = self._name(slot)
        self._nodes[name] = slot.node
        return Machine(name, slot.address, 1, self._cpus, reserved=f"{_WORKER}{index}")

    def start(self, machine: Machine, program: HostProgram) -> RayProcess:
        group = self._workers
        of_node: list[int] = []  # actors whose GPUs the process may use
        if machine.reserved.startswith(_WORKER):
            index = int(machine.reserved.removeprefix(_WORKER))
            of_node = [index]
        elif machine.reserved:
            number, index = map(int, machine.reserved.split(":"))
            group = self._servers[number]
        else:
            node = self._nodes[machine.name]
            of_node = [i for i, slot in enumerate(self._slots) if slot.node == node]
            index = self._free(of_node)
        gpus = [gpu for i in of_node for gpu in self._slots[i].gpus]
        if gpus:
            environ = {**program.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
            program = replace(program, environ=environ)
        assert group is not None
        try:
            process = group.run(index, program)
        except BadInput as error:
            raise BadInput(f"{machine.name}: {error}") from None
        if group is self._workers:
            self._running[index] = process
            self._promised.discard(index)
        return process

    def _free(self, indices: Sequence[int]) -> int:
        """An actor that runs no agent; where one is still ending, it is waited for."""
        pause = Backoff(0.01, 0.5)
        while True:
            for index in indices:
                if self._is_free(index):
                    return index
            pause()

    def _is_free(self, index: int) -> bool:
        return index not in self._running or self._running[index].has_ended

    # ------------------------------------------------------------------ what is reserved

    def _bundle_of_worker(self, workers: int) -> Bundle:
        """With a GPU where one is asked for, or where the cluster has one for each."""
        device = self._config.device or ""
        with_gpu: Bundle = {"CPU": self._cpus, "GPU": 1}
        wants = device.startswith("cuda")
        if wants or (not device and room_for(nodes_now(), with_gpu) >= workers):
            return with_gpu
        return {"CPU": self._cpus}

    def _check_room(self, count: int, what: str, bundle: Bundle, nodes: Sequence[RayNode]) -> None:
        """BadInput where the cluster is too small; with --timeout it may grow until then."""
        room = room_for(nodes, bundle)
        if room >= count or self._config.wait.limit_s is not None:
            return
        do = "does" if count == 1 else "do"
        raise BadInput(
            f"{_asked(count, what, bundle)} {do} not fit the Ray cluster:"
            f" it has {resources_in_words(nodes, bundle)}, which is room for {room}; take fewer "
            f"{what}s, add nodes (ray start --address=…), or wait for a cluster that grows with "
            "--timeout SECONDS"
        )

    def _reserve(self, group: SlotGroup, what: str) -> None:
        """For as long as others use the CPUs, or until --timeout."""
        self._wait(group, what, lambda: group.is_reserved(_INTERRUPTIBLE_S) or None)
        group.start_actors()

    def _find(self, group: SlotGroup, what: str) -> list[Slot]:
        return self._wait(group, what, lambda: group.find_all(_INTERRUPTIBLE_S))

    def _wait(self, group: SlotGroup, what: str, find: Callable[[], _Found | None]) -> _Found:
        """Until it is found; says what it waits for, and gives up after --timeout."""
        start_s = time.monotonic()
        noticed = False
        while (found := find()) is None:
            seconds = time.monotonic() - start_s
            if seconds < min(self._config.wait.notice_s, self._limit_s):
                continue
            has = f"the Ray cluster has {resources_in_words(nodes_now(), group.bundle)}"
            if seconds >= self._limit_s:
                raise BadInput(f"Ray has not placed {what} in {seconds:.0f} s: {has}")
            if not noticed:
                say(f"waiting for Ray to place {what}: {has}")
            noticed = True
        return found

    @property
    def _cpus(self) -> int:
        """Which a worker reserves."""
        return self._config.num_threads or 1

    @property
    def _limit_s(self) -> float:
        return self._config.wait.limit_s or math.inf

    # ------------------------------------------------------------------ names

    def _server_machine(self, number: int, index: int, slot: Slot) -> Machine:
        return Machine(self._name(slot), slot.address, 1, reserved=f"{number}:{index}")

    def _address_of(self, node: str) -> str:
        return next(slot.address for slot in self._slots if slot.node == node)

    def _name(self, slot: Slot) -> str:
        """Of its host, with a part of its id where the cluster has several nodes there."""
        is_alone = sum(node.hostname == slot.hostname for node in self._known) < 2
        return slot.hostname if is_alone else f"{slot.hostname}-{slot.node[:6]}"


def _bundles_of_servers(servers: int, replication: Replication) -> list[list[Bundle]]:
    """One group of all servers; with replicas one of each shard, and one of the coordinator.

    Ray spreads the bundles of one group over nodes.
    """
    if not replication.is_on:
        return [[_SERVER] * servers]
    shards = servers // replication.replicas
    return [[_SERVER] * replication.replicas for _ in range(shards)] + [
        [head_bundle(_SERVER_BYTES)]
    ]


def _asked(count: int, what: str, bundle: Bundle) -> str:
    """ "2 workers with 1 CPU each", "1 server with 128 MiB of memory"."""
    each = " each" if count > 1 else ""
    return f"{counted(count, what)} with {bundle_in_words(bundle)}{each}"
