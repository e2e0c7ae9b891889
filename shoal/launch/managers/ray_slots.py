"""Places that Ray has reserved: a placement group, and an actor in each of its bundles.

SlotActor   runs one process for the launcher; Ray restarts it elsewhere with its bundle
RayProcess  that process, as the launcher sees it
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal.errors import BadInput
from shoal.launch.hosts.machines import HostProgram
from shoal.launch.managers.polled_process import PolledProcess
from shoal.launch.managers.ray_cluster import Bundle, nodes_now
from shoal.runtime.waits import Backoff

_READ_S = 20.0  # a call of `read` that has nothing to tell returns after it
_LOOK_S = 5.0  # a call that takes longer than it should may be for a node that is lost


@dataclass(frozen=True)
class Slot:
    """Where Ray has placed an actor."""

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

    def run(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], given: bytes
    ) -> None:
        """The launcher's interpreter, or that of Ray where a node has it elsewhere."""
        program = command[0] if os.access(command[0], os.X_OK) else sys.executable
        self.start(name, [program, *command[1:]], environ, given)


class RayProcess:
    """One process of an actor.

    Ray keeps a call until it has restarted the actor of a lost node, which may be never. The
    process was lost with the node, so no call is waited for once the node is gone.
    """

    def __init__(self, actor: Any, node: str, on_line: Callable[[str], None]):
        self._actor = actor
        self._node = node
        self._on_line = on_line
        self._name = secrets.token_hex(8)
        self._is_lost = False
        self.has_ended = False

    def start(self, command: Sequence[str], environ: Mapping[str, str], given: bytes) -> None:
        """BadInput where there is no such program; that the node is lost is said by `wait`."""
        try:
            call = self._actor.run.remote(self._name, list(command), dict(environ), given)
            self._result(call, _LOOK_S)
        except RayTaskError as error:
            raise BadInput(str(error.cause)) from None
        except RayActorError:
            self._is_lost = True

    def wait(self) -> int:
        try:
            return self._wait()
        finally:
            self.has_ended = True

    def _wait(self) -> int:
        returncode = None
        while returncode is None and not self._is_lost:
            try:
                call = self._actor.read.remote(self._name, _READ_S)
                lines, returncode = self._result(call, _READ_S + _LOOK_S)
            except RayError:
                self._is_lost = True
                continue
            for line in lines:
                self._on_line(line)
        if returncode is None:
            self._on_line("Ray cannot reach this node any more")
            return -int(signal.SIGKILL)
        return int(returncode)

    def _result(self, call: Any, look_s: float) -> Any:
        """RayActorError where the node is lost."""
        while True:
            try:
                return ray.get(call, timeout=look_s)
            except GetTimeoutError:
                if all(node.node_id != self._node for node in nodes_now()):
                    raise RayActorError from None

    def send_signal(self, number: signal.Signals) -> None:
        self._actor.send_signal.remote(self._name, number)


class SlotGroup:
    """Bundles of one placement group; Ray reserves them in the background."""

    def __init__(self, bundles: Sequence[Bundle], strategy: str, not_on: str | None = None):
        """`not_on`: a node that is to have none, except where a bundle asks for its resources."""
        self._bundles = bundles
        self._actors: list[Any] = []
        self._asked: list[Any] = []  # calls that tell where the actors are
        self._pause = Backoff(0.1, 2.0)
        self._found: dict[int, Slot] = {}  # where each actor was when it was asked last
        selectors = None
        if not_on is not None:
            selector = {"ray.io/node-id": f"!{not_on}"}
            selectors = [selector if set(b) <= {"memory", "CPU", "GPU"} else {} for b in bundles]
        self._group = placement_group(
            [dict(bundle) for bundle in bundles], strategy, bundle_label_selector=selectors
        )

    @property
    def bundle(self) -> Bundle:
        """The first one."""
        return self._bundles[0]

    def is_reserved(self, wait_s: float) -> bool:
        """Waits for it, at most for so long."""
        return bool(self._group.wait(wait_s))

    def start_actors(self) -> None:
        actor = ray.remote(SlotActor)
        self._actors = [
            actor.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory", 0),
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index, bundle in enumerate(self._bundles)
        ]

    def find_all(self, wait_s: float) -> list[Slot] | None:
        """None where an actor has not answered yet: Ray may have to restart it elsewhere."""
        self._asked = self._asked or [actor.where.remote() for actor in self._actors]
        try:
            slots: list[Slot] = ray.get(self._asked, timeout=wait_s)
        except GetTimeoutError:
            return None
        except ActorUnavailableError:
            self._asked = []
            self._pause()
            return None
        except ActorDiedError as error:
            raise BadInput(f"Ray cannot start its actors: {_first_line(error)}") from None
        self._asked = []
        self._found = dict(enumerate(slots))
        return slots

    def find(self, index: int, over: threading.Event) -> Slot | None:
        """Waits until Ray has placed it again; None when `over` is set."""
        backoff = Backoff(0.1, 2.0)
        while not over.is_set():
            try:
                slot: Slot = ray.get(self._actors[index].where.remote(), timeout=1.0)
                self._found[index] = slot
                return slot
            except (ActorUnavailableError, GetTimeoutError):
                backoff()
            except RayError as error:
                why = _first_line(error)
                raise BadInput(f"Ray cannot start its actor again: {why}") from None
        return None

    def run(self, index: int, program: HostProgram) -> RayProcess:
        """Start a process in the actor of a bundle."""
        process = RayProcess(self._actors[index], self._found[index].node, program.on_line)
        process.start(program.command, program.environ, program.given)
        return process

    def release(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)


def _first_line(error: RayError) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
