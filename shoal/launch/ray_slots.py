"""Places that Ray has reserved: a placement group, and an actor in each of its bundles.

SlotActor   runs one process for the launcher; Ray restarts it elsewhere with its bundle
RayProcess  that process, as the launcher sees it
"""

from __future__ import annotations

import os
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
from shoal.launch.polled_process import PolledProcess
from shoal.launch.ray_cluster import Bundle
from shoal.runtime.backoff import Backoff

_READ_S = 20.0  # a call of `read` that has nothing to tell returns after it


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

    def run(self, command: Sequence[str], environ: Mapping[str, str], given: bytes) -> None:
        """The launcher's interpreter, or that of Ray where a node has it elsewhere."""
        program = command[0] if os.access(command[0], os.X_OK) else sys.executable
        self.start([program, *command[1:]], environ, given)


class RayProcess:
    """One process of an actor."""

    def __init__(self, actor: Any, on_line: Callable[[str], None]):
        self._actor = actor
        self._on_line = on_line
        self.has_ended = False

    def wait(self) -> int:
        try:
            return self._wait()
        finally:
            self.has_ended = True

    def _wait(self) -> int:
        returncode = None
        while returncode is None:
            try:
                lines, returncode = ray.get(self._actor.read.remote(_READ_S))
            except RayError:
                self._on_line("Ray cannot reach this node any more")
                return -int(signal.SIGKILL)
            for line in lines:
                self._on_line(line)
        return int(returncode)

    def preempt(self) -> None:
        self._actor.preempt.remote()

    def terminate(self) -> None:
        self._actor.terminate.remote()

    def kill(self) -> None:
        self._actor.kill.remote()


class SlotGroup:
    """Bundles of one placement group; Ray reserves them in the background."""

    def __init__(self, bundles: Sequence[Bundle], strategy: str, not_on: str | None = None):
        """`not_on`: a node that is to have none, except where a bundle asks for its resources."""
        self._bundles = bundles
        self._actors: list[Any] = []
        selectors = None
        if not_on is not None:
            selector = {"ray.io/node-id": f"!{not_on}"}
            selectors = [selector if set(b) <= {"memory", "CPU", "GPU"} else {} for b in bundles]
        self._group = placement_group(
            [dict(bundle) for bundle in bundles], strategy, bundle_label_selector=selectors
        )

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
        """None where an actor has not answered: Ray may have to restart it elsewhere."""
        try:
            calls = [actor.where.remote() for actor in self._actors]
            return list(ray.get(calls, timeout=wait_s))
        except ActorDiedError as error:
            first = str(error).strip().partition("\n")[0].rstrip(".")
            raise BadInput(f"Ray cannot start its actors: {first}") from None
        except (ActorUnavailableError, GetTimeoutError):
            return None

    def find(self, index: int, over: threading.Event) -> Slot | None:
        """Waits until Ray has placed it again; None when `over` is set."""
        backoff = Backoff(0.1, 2.0)
        while not over.is_set():
            try:
                slot: Slot = ray.get(self._actors[index].where.remote(), timeout=1.0)
                return slot
            except (ActorUnavailableError, GetTimeoutError):
                backoff()
            except RayError as error:
                raise BadInput(f"Ray cannot start its actor again: {error}") from None
        return None

    def run(
        self,
        index: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        given: bytes,
        on_line: Callable[[str], None],
    ) -> RayProcess:
        """Start a process in the actor of a bundle."""
        actor = self._actors[index]
        try:
            ray.get(actor.run.remote(list(command), dict(environ), given))
        except RayTaskError as error:
            raise BadInput(str(error.cause)) from None
        except RayActorError:
            pass  # `wait` says that the node is lost
        return RayProcess(actor, on_line)

    def release(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)
