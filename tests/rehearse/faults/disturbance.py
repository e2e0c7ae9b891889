"""Faults in virtual time: of messages, connections and processes."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from shoal.errors import PeerLost
from shoal.rehearse import sockets, world
from shoal.rehearse.network import VirtualMessage, VirtualNetwork
from shoal.rehearse.sockets import VirtualProcess, VirtualSocket, VirtualSockets
from shoal.rehearse.virtual_time import Fiber, VirtualTime
from shoal.runtime import clock
from shoal.runtime.acceptor import SILENT_PEER_S
from shoal.server.client.route import Request, Route
from shoal.server.process import shard_file
from shoal.server.process.server import Server
from shoal.server.protocol import FrameKind
from shoal.server.protocol.connection import Connection
from shoal.train.checkpoints import tensor_file
from tests.rehearse.faults.scenario import (
    AnyOrder,
    Breaks,
    Cut,
    Delays,
    Interrupted,
    Scenario,
    ServerDisk,
    Silent,
    Stop,
)

LIMIT_S = 2000.0  # of virtual time: longer than all faults and limits of a run together
_OF_PUSHES = {FrameKind.BUCKET, FrameKind.COMPRESSED, FrameKind.COMMIT}
MAX_TURNS = 50_000  # of threads at one moment: what takes more makes no progress


class DisturbedTime(VirtualTime):
    """Processes stop, threads run in any order, and no run takes for ever."""

    def __init__(self, around: Any = nullcontext) -> None:
        super().__init__(around)
        self.stopped: dict[str, float] = {}  # until when, by the name of a process
        self.order: random.Random | None = None
        self._turns = (0.0, 0)  # the present moment, and how many there were
        self.at(LIMIT_S, self._give_up)

    def _next(self) -> Fiber:
        moment_s, turns = self._turns
        self._turns = self.now_s, turns + 1 if moment_s == self.now_s else 0
        if turns == MAX_TURNS:
            self._give_up()
        while True:
            if self.order is not None and len(self._ready) > 1:
                self._ready.rotate(-self.order.randrange(len(self._ready)))
            fiber = super()._next()
            until_s = self.stopped.get(getattr(fiber.group, "name", ""), 0.0)
            if until_s <= self.now_s or fiber.is_ending:
                return fiber
            self.at(until_s, partial(self.wake, fiber))

    def _give_up(self) -> None:
        self._hang()


class DisturbedNetwork(VirtualNetwork):
    """Messages leave late."""

    disturbance: Disturbance

    def _start(self, message: VirtualMessage, arrived: Callable[[], None]) -> None:
        leaves_s = self.disturbance.leaves_s(message)
        if leaves_s > self._time.now_s:
            self._time.at(leaves_s, partial(super()._start, message, arrived))
        else:
            super()._start(message, arrived)


class DisturbedSocket(VirtualSocket):
    """`carries(n)` says how many of the next n bytes arrive, or n = 1 for the end; None: all do."""

    carries: Callable[[int], int] | None = None
    _network: DisturbedNetwork

    def join(self, peer: VirtualSocket) -> None:
        super().join(peer)
        assert isinstance(peer, DisturbedSocket)
        self._network.disturbance.connected(self, peer)

    def _transmit(self, data: Sequence[memoryview] | None, size: int = 0) -> None:
        peer = self._peer
        is_over = self._is_shut or peer is None or (data is not None and peer._is_shut)
        if self.carries is not None and not is_over:
            arriving = self.carries(size or 1)
            if not arriving:
                return
            if data is not None:
                data, size = [memoryview(b"".join(data))[:arriving]], arriving
        super()._transmit(data, size)

    def reset(self) -> None:
        """This end learns that the connection is broken."""
        self._is_over = self._is_shut = True
        self._wake()


class DisturbedSockets(VirtualSockets):
    """To connect takes as long as hosts are cut off from each other."""

    _network: DisturbedNetwork

    def connect(self, address: str, timeout_s: float) -> VirtualSocket:
        if (listener := self._listeners.get(address)) is not None:
            devices = self._place().device, listener.place.device
            self._network.disturbance.reach(*devices, timeout_s)
        return super().connect(address, timeout_s)


@contextmanager
def disturbed() -> Iterator[None]:
    """A rehearsal that is made, or runs, in this block has these in place of the usual ones."""
    with (
        mock.patch.object(world, "VirtualTime", DisturbedTime),
        mock.patch.object(world, "VirtualNetwork", DisturbedNetwork),
        mock.patch.object(world, "VirtualSockets", DisturbedSockets),
        mock.patch.object(sockets, "VirtualSocket", DisturbedSocket),
    ):
        yield


class Disturbance:
    """What a scenario does to messages and connections; everything follows from its seed."""

    def __init__(self, scenario: Scenario, time: DisturbedTime):
        self._random = random.Random(f"disturbance {scenario.seed}")
        self._time = time
        self._cuts = [fault for fault in scenario.faults if isinstance(fault, Cut)]
        self._delays = [fault for fault in scenario.faults if isinstance(fault, Delays)]
        self._silent = [fault for fault in scenario.faults if isinstance(fault, Silent)]
        self._breaks = next((f for f in scenario.faults if isinstance(f, Breaks)), None)
        self.interrupted = [f for f in scenario.faults if isinstance(f, Interrupted)]
        self._left = 0 if self._breaks is None else self._breaks.connections
        self._connections: list[tuple[DisturbedSocket, DisturbedSocket]] = []
        self.broken = 0
        if any(isinstance(fault, AnyOrder) for fault in scenario.faults):
            time.order = random.Random(f"order {scenario.seed}")
        for fault in scenario.faults:
            if isinstance(fault, Stop):
                time.at(fault.at_s, partial(self._stop, fault))
            if isinstance(fault, Cut) and fault.for_s > SILENT_PEER_S:
                time.at(fault.at_s + SILENT_PEER_S, partial(self._end_across, fault))

    def leaves_s(self, message: VirtualMessage) -> float:
        leaves_s = self._time.now_s
        for delays in self._delays:
            if self._random.random() < delays.share:
                leaves_s += self._random.random() * delays.most_s
        return self._healed_s(message.src, message.dst, leaves_s)

    def reach(self, src: int, dst: int, timeout_s: float) -> None:
        wait_s = self._healed_s(src, dst, self._time.now_s) - self._time.now_s
        if wait_s > 0:
            clock.sleep(min(wait_s, timeout_s))
        if wait_s > timeout_s:
            raise TimeoutError("timed out")

    def connected(self, here: DisturbedSocket, there: DisturbedSocket) -> None:
        self._connections.append((here, there))
        breaks = self._breaks
        if breaks is None or not self._left:
            return
        is_of_server = self._time.current.name.startswith(("shoal-serve", "shoal-follow"))
        if is_of_server and not breaks.of_servers:
            return
        if self._random.random() < 0.6:
            self._left -= 1
            _Break(self, here, there, self._random.randrange(breaks.most_bytes))

    def broke(self, here: DisturbedSocket, there: DisturbedSocket) -> None:
        self.broken += 1
        assert self._breaks is not None
        for end in (here, there):
            late_s = self._random.choice((0.0, self._random.random() * self._breaks.late_s))
            self._time.at(self._time.now_s + late_s, end.reset)

    def end_connection(self, here: Any) -> None:
        """What was sent over it has arrived, and nothing else does."""
        there = here._peer
        here.carries = there.carries = lambda size: 0
        here.reset()
        self._time.at(self._time.now_s + self._random.choice((0.0, 0.01)), there.reset)

    def silence(self, process: VirtualProcess) -> None:
        """It is about to be killed: what it sends is lost, the end of its connections, too."""
        for silent in self._silent:
            for here, there in self._connections:
                if process in (here.place, there.place) and here.place is not there.place:
                    here.carries = there.carries = lambda size: 0
                    other = there if here.place is process else here
                    self._time.at(self._time.now_s + silent.for_s, other.reset)

    def _healed_s(self, src: int, dst: int, moment_s: float) -> float:
        for cut in self._cuts:
            is_across = src != dst and cut.device in (src, dst)
            if is_across and cut.at_s <= moment_s < cut.at_s + cut.for_s:
                return cut.at_s + cut.for_s
        return moment_s

    def _stop(self, stop: Stop) -> None:
        until_s = self._time.stopped.get(stop.name, 0.0)
        self._time.stopped[stop.name] = max(until_s, stop.at_s + stop.for_s)

    def _end_across(self, cut: Cut) -> None:
        """Both systems have heard nothing for so long."""
        for here, there in self._connections:
            devices = here.place.device, there.place.device
            if cut.device in devices and devices[0] != devices[1]:
                here.carries = there.carries = lambda size: 0
                here.reset()
                there.reset()


@contextmanager
def interruptions(disturbance: Disturbance, lose: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, workers are interrupted between two frames of their pushes."""
    send = Route.send
    left = {fault.name: fault for fault in disturbance.interrupted}
    sent = Counter[str]()

    def sent_or_interrupted(self: Route, connection: Connection, request: Request) -> None:
        name = f"worker {self.rank}"
        fault = left.get(name)
        is_due = fault is not None and sent[name] >= fault.frames and request.kind in _OF_PUSHES
        if is_due and fault is not None:
            left.pop(name)
            if fault.ends == "process":
                lose(name)
            if fault.ends == "request":
                raise PeerLost(self.rank, None, f"{request.kind.name} (interrupted)")
            disturbance.end_connection(connection.sock)
        sent[name] += request.kind in _OF_PUSHES
        send(self, connection, request)

    with mock.patch.object(Route, "send", sent_or_interrupted):
        yield


class _Break:
    """A connection that breaks when it has carried so many bytes."""

    def __init__(
        self, disturbance: Disturbance, here: DisturbedSocket, there: DisturbedSocket, left: int
    ):
        self._disturbance = disturbance
        self._ends = here, there
        self._left = left
        self._is_broken = False
        here.carries = there.carries = self.carry

    def carry(self, size: int) -> int:
        if self._is_broken:
            return 0
        if size <= self._left:
            self._left -= size
            return size
        self._is_broken = True
        self._disturbance.broke(*self._ends)
        return self._left


# ---------------------------------------------------------------------- disks


class _FullFile:
    """A file on a disk with so much room left."""

    def __init__(self, handle: Any, room: list[int]):
        self._handle = handle
        self._room = room

    def __enter__(self) -> _FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def write(self, data: memoryview) -> int:
        taken = min(len(data), self._room[0])
        self._handle.write(data[:taken])
        self._room[0] -= taken
        if taken < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """While the block runs, there is room for so many bytes of tensors."""
    room = [num_bytes]

    def limited(file: Path, mode: str, **options: Any) -> Any:
        return _FullFile(open(file, mode, **options), room)

    with mock.patch.object(tensor_file, "open", limited, create=True):
        yield


@contextmanager
def saving_servers(disk: ServerDisk | None, folder: Path) -> Iterator[None]:
    """While the block runs, servers save there, and some files find the disk full."""
    if disk is None:
        yield
        return
    numbers = itertools.count()

    def server(address: str, *args: Any, **options: Any) -> Server:
        made = Server(address, *args, **options)
        made.host.saver = shard_file.ShardSaver(folder, address)
        return made

    def save_file(tensors: dict[str, Tensor], file: Path) -> None:
        data = save(tensors)
        if next(numbers) in disk.full and len(data) > disk.num_bytes:
            file.write_bytes(data[: disk.num_bytes])
            raise SafetensorError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")
        file.write_bytes(data)

    with (
        mock.patch.object(world, "Server", server),
        mock.patch.object(shard_file, "save_file", save_file),
    ):
        yield
