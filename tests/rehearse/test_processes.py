"""What the death of a virtual process looks like to others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.cluster.presets import load_cluster
from shoal.comm.group import Group
from shoal.errors import PeerLost
from shoal.rehearse.executor import Virtual, VirtualRanks
from shoal.rehearse.network import VirtualNetwork
from shoal.rehearse.processes import KILLED, VirtualProcesses
from shoal.rehearse.sockets import VirtualSockets
from shoal.rehearse.virtual_time import VirtualTime
from shoal.runtime import clock
from tests.rehearse.worlds import CLUSTER, in_virtual_time


class Machine:
    """Processes by name, and how they ended."""

    def __init__(self, time: VirtualTime):
        self.time = time
        self.network = VirtualNetwork(load_cluster(CLUSTER).of_size(4), time)
        self.sockets = VirtualSockets(self.network, time)
        self.processes = VirtualProcesses(time, self.sockets)
        self.ended: dict[str, int] = {}
        self.said: list[Any] = []

    def start(self, name: str, device: int, body: Any) -> None:
        def whole() -> int:
            body()
            return 0

        def exited(status: int) -> None:
            self.ended[name] = status

        self.processes.start(name, device, whole, exited)


def test_a_killed_process_runs_no_more_and_its_threads_neither() -> None:
    def body(time: VirtualTime) -> None:
        machine = Machine(time)

        def count(name: str) -> None:
            while True:
                clock.sleep(1.0)
                machine.said.append((name, time.now_s))

        def main() -> None:
            clock.Thread(target=count, args=("thread",)).start()
            count("main")

        machine.start("worker 0", 0, main)
        clock.sleep(2.5)
        machine.processes.kill("worker 0")
        machine.processes.kill("worker 0")
        clock.sleep(5.0)
        assert machine.said == [("main", 1.0), ("thread", 1.0), ("main", 2.0), ("thread", 2.0)]
        assert machine.ended == {"worker 0": KILLED}

    in_virtual_time(body)


def test_a_process_may_kill_itself_and_its_blocks_are_left() -> None:
    def body(time: VirtualTime) -> None:
        machine = Machine(time)

        def main() -> None:
            try:
                machine.processes.kill("worker 0")
                time.check()
                machine.said.append("goes on")
            finally:
                machine.said.append("left")

        machine.start("worker 0", 0, main)
        clock.sleep(1.0)
        assert machine.said == ["left"]
        assert machine.ended == {"worker 0": KILLED}

    in_virtual_time(body)


def test_what_was_sent_arrives_before_the_end_of_the_connection() -> None:
    def body(time: VirtualTime) -> None:
        machine = Machine(time)

        def serve() -> None:
            _, listener = machine.sockets.listen("here")
            sock = listener.accept(lambda: True)
            assert sock is not None
            buffer = bytearray(8)
            while count := sock.recv_into(memoryview(buffer)):
                machine.said.append(bytes(buffer[:count]))
            machine.said.append("end")
            with pytest.raises(BrokenPipeError):
                sock.send(b"late")

        def speak() -> None:
            sock = machine.sockets.connect("virtual:here", 1.0)
            sock.send(b"one")
            sock.send(b"two")
            machine.processes.kill("worker 1")
            time.check()

        machine.start("worker 0", 0, serve)
        machine.start("worker 1", 1, speak)
        clock.sleep(1.0)
        assert b"".join(machine.said[:-1]) == b"onetwo" and machine.said[-1] == "end"
        assert machine.ended == {"worker 0": 0, "worker 1": KILLED}

    in_virtual_time(body)


def test_nothing_answers_where_a_killed_process_has_listened() -> None:
    def body(time: VirtualTime) -> None:
        machine = Machine(time)

        def serve() -> None:
            machine.sockets.listen("here")
            clock.Event().wait()

        def ask() -> None:
            machine.sockets.connect("virtual:here", 1.0).close()
            machine.processes.kill("server 0")
            with pytest.raises(ConnectionRefusedError):
                machine.sockets.connect("virtual:here", 1.0)

        machine.start("server 0", 0, serve)
        machine.start("worker 0", 1, ask)
        clock.sleep(1.0)
        assert machine.ended == {"server 0": KILLED, "worker 0": 0}

    in_virtual_time(body)


def lose_a_rank(body: Any) -> list[Any]:
    """What `body(group)` says on ranks 0 and 1; rank 2 sends to rank 0 and is killed at 1 s."""

    def main(time: VirtualTime) -> list[Any]:
        machine = Machine(time)
        ranks = VirtualRanks(machine.network, time, range(3), "auto")

        def run(rank: int) -> None:
            group = Group(Virtual(ranks, range(3), rank))
            if rank == 2:
                group.send(torch.ones(1), 0).wait()
                clock.Event().wait()
            machine.said.append((rank, body(group), time.now_s))

        for rank in range(3):
            machine.start(f"worker {rank}", rank, lambda rank=rank: run(rank))
        clock.sleep(1.0)
        machine.processes.kill("worker 2")
        ranks.lose(2, is_lost=True)
        clock.sleep(9.0)
        return machine.said

    found: list[Any] = in_virtual_time(main)
    return sorted(found)


def test_those_who_wait_for_it_in_a_collective_lose_it() -> None:
    def body(group: Group) -> str:
        with pytest.raises(PeerLost) as caught:
            group.all_reduce(torch.zeros(2)).wait()
        return str(caught.value)

    told = "lost rank 2 in all_reduce #1 of ranks 0, 1, 2: see that rank's output for the cause"
    assert lose_a_rank(body) == [(rank, f"rank {rank} {told}", 1.0) for rank in (0, 1)]


def test_what_it_has_sent_is_received_and_nothing_after_that() -> None:
    def body(group: Group) -> float:
        if group.rank == 1:
            return 0.0
        clock.sleep(2.0)
        into = torch.zeros(1)
        group.recv(into, 2).wait()
        with pytest.raises(PeerLost):
            group.recv(into, 2).wait()
        return float(into)

    assert lose_a_rank(body) == [(0, 1.0, 2.0), (1, 0.0, 0.0)]
