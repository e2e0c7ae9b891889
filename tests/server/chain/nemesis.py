"""What happens in the simulated world: workers that push and pull, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.server.chain.counters import Push, Resume
from tests.server.chain.history import NEVER
from tests.server.chain.network import MESSAGE_S, TTL_S

if TYPE_CHECKING:
    from tests.server.chain.replica import Replica
    from tests.server.chain.world import World

RETRY_S = 0.012


class Worker:
    """One push at a time; a pull now and then. It repeats a push until it is acknowledged."""

    def __init__(self, world: World, number: int, pushes: int):
        self.world = world
        self.loop = world.loop
        self.number = number
        self.incarnation = 1
        self.sequence = 0
        self.left = pushes
        self.head = 0
        self.attempt = 0  # of operations
        self.tries = 0  # of pushes
        self.is_done = False
        self.loop.after(self.loop.soon(0.002), self.next, 0)

    def next(self, attempt: int) -> None:
        if attempt != self.attempt:
            return
        self.attempt += 1
        if self.left == 0:
            self.is_done = True
        elif self.loop.chance(0.4):
            self.pull()
        else:
            self.push()

    def restart(self) -> None:
        """It does not know what has become of its last push, and begins a new sequence."""
        self.incarnation += 1
        self.sequence = 0
        self.left -= 1 if self.left else 0
        self.next(self.attempt)

    # ------------------------------------------------------------------ pushes

    def push(self) -> None:
        self.sequence += 1
        key = self.loop.rng.randrange(2)
        op = Push(self.number, self.incarnation, self.sequence, key, len(self.world.pushes))
        self.world.pushes[op] = (self.loop.now_s, NEVER)
        self.try_push(op, self.attempt)

    def try_push(self, op: Push, attempt: int) -> None:
        if attempt != self.attempt:
            return
        self.tries += 1
        tried = self.tries
        call(
            self.world,
            self.head,
            "push",
            op,
            lambda answer: self.pushed(op, attempt, tried, answer),
        )
        self.loop.after(RETRY_S, self.retry, op, attempt, tried)

    def retry(self, op: Push, attempt: int, tried: int) -> None:
        if tried == self.tries:
            self.head = self.loop.rng.randrange(self.world.replica_count)
            self.try_push(op, attempt)

    def pushed(self, op: Push, attempt: int, tried: int, answer: Any) -> None:
        if attempt != self.attempt:
            return
        if answer is True:
            self.world.note_acknowledged(op)
            self.left -= 1
            self.attempt += 1
            self.loop.after(self.loop.soon(0.004), self.next, self.attempt)
        elif answer == "resume":
            self.resume(op)
        elif answer is not None and tried == self.tries:
            self.head = answer
            self.loop.after(MESSAGE_S, self.try_push, op, attempt)

    def resume(self, op: Push) -> None:
        """Pushes that were acknowledged are lost: say where this worker is, then go on."""
        self.attempt += 1
        attempt = self.attempt
        call(self.world, self.head, "push", Resume(op.worker, op.incarnation, op.sequence - 1), id)
        self.loop.after(2 * MESSAGE_S, self.try_push, op, attempt)

    # ------------------------------------------------------------------ pulls

    def pull(self) -> None:
        attempt = self.attempt

        def pulled(answer: Any) -> None:
            if attempt == self.attempt:
                note(answer)
            self.next(attempt)

        replica, key, note = a_read(self.world)
        call(self.world, replica, "read", key, pulled)
        self.loop.after(RETRY_S, pulled, None)


def a_read(world: World) -> tuple[int, int, Callable[[Any], None]]:
    """Any replica, any key, and what notes the answer."""
    key = world.loop.rng.randrange(2)
    replica = world.loop.rng.randrange(world.replica_count)
    begun_s = world.loop.now_s

    def note(answer: Any) -> None:
        if isinstance(answer, tuple):
            world.note_read(key, answer[0], begun_s)

    return replica, key, note


def keep_reading(world: World) -> None:
    """Pull from any replica, again and again."""
    if not world.is_calm:
        replica, key, note = a_read(world)
        call(world, replica, "read", key, note)
        world.loop.after(world.loop.soon(0.005), keep_reading, world)


def call(world: World, replica: int, method: str, argument: Any, answered: Any) -> None:
    """Requests and answers take time, are lost, and come twice."""
    loop = world.loop
    process = world.replicas[replica].process

    def answer(value: Any) -> None:
        if not loop.chance(0.03):
            loop.after(loop.soon(MESSAGE_S), answered, value)

    for _ in range(world.copies()):
        do = getattr(world.replicas[replica], method)
        loop.after(loop.soon(MESSAGE_S), process.run, process.life, do, (argument, answer))


FAULTS = (
    "crash",
    "crash",
    "pause",
    "pause",
    "isolate",
    "cut_coordinator",
    "break_link",
    "break_one_way",
    "cut_pair",
    "stall",
    "stop_coordinator",
    "restart_worker",
)


class Nemesis:
    """Faults at random moments of the first `chaos_s`, and their ends."""

    def __init__(self, world: World, chaos_s: float, faults: tuple[str, ...]):
        self.world = world
        self.loop = world.loop
        rng = self.loop.rng
        for _ in range(rng.randint(1, 7)):
            fault = getattr(self, rng.choice(faults))
            self.loop.after(chaos_s * (0.05 + 0.95 * rng.random()), fault)

    def some_replica(self) -> Replica:
        return self.loop.rng.choice(self.world.replicas)

    def crash(self) -> None:
        """It loses its memory. The last member that works is spared."""
        replica = self.some_replica()
        config = self.world.coordinator.store.config
        others = [m for m in config.members if m != replica.me] if config else []
        if not replica.process.is_up or not any(self.world.is_sound(m) for m in others):
            return
        replica.process.die()
        for other in range(self.world.replica_count):
            if other != replica.me:
                self.world.network.break_link(replica.me, other, self.loop.chance(0.5))
        self.loop.after(self.loop.soon(TTL_S / 2), self.restart, replica)

    def restart(self, replica: Replica) -> None:
        if not replica.process.is_up:
            replica.start()
            self.world.connect_all()

    def pause(self) -> None:
        replica = self.some_replica()
        replica.process.pause()
        self.loop.after(self.loop.soon(TTL_S), self.resume, replica)

    def resume(self, replica: Replica) -> None:
        if replica.process.is_paused:
            replica.process.resume()

    def isolate(self) -> None:
        """A cut from the coordinator, and in one direction or both from some replicas."""
        replica = self.some_replica()
        seconds = self.loop.soon(TTL_S)
        self.world.coordinator.cut.add(replica.process)
        self.loop.after(seconds, self.world.coordinator.cut.discard, replica.process)
        for other in range(self.world.replica_count):
            if other != replica.me and self.loop.chance(0.5):
                self.world.network.stall(replica.me, other, seconds)
                if self.loop.chance(0.5):
                    self.world.network.stall(other, replica.me, seconds)

    def cut_coordinator(self) -> None:
        """Some replicas reach each other, but not the coordinator."""
        for replica in self.world.replicas:
            if self.loop.chance(0.6):
                self.world.coordinator.cut.add(replica.process)
                seconds = self.loop.soon(TTL_S)
                self.loop.after(seconds, self.world.coordinator.cut.discard, replica.process)

    def break_link(self) -> None:
        a, b = self.loop.rng.sample(range(self.world.replica_count), 2)
        self.world.network.break_link(a, b)

    def break_one_way(self) -> None:
        a, b = self.loop.rng.sample(range(self.world.replica_count), 2)
        self.world.network.break_one_way(a, b)

    def cut_pair(self) -> None:
        """Two replicas do not reach each other; both reach all else."""
        a, b = self.loop.rng.sample(range(self.world.replica_count), 2)
        self.world.network.cut(a, b, self.loop.soon(4 * TTL_S))

    def stall(self) -> None:
        a, b = self.loop.rng.sample(range(self.world.replica_count), 2)
        self.world.network.stall(a, b, self.loop.soon(TTL_S / 2))

    def stop_coordinator(self) -> None:
        self.world.coordinator.is_up = False
        self.loop.after(self.loop.soon(TTL_S), self.start_coordinator)

    def start_coordinator(self) -> None:
        self.world.coordinator.is_up = True

    def restart_worker(self) -> None:
        worker = self.loop.rng.choice(self.world.workers)
        if not worker.is_done:
            worker.restart()

    def end(self) -> None:
        """Everything works again."""
        self.start_coordinator()
        self.world.coordinator.loss = 0.0
        self.world.coordinator.cut.clear()
        self.world.network.heal()
        for replica in self.world.replicas:
            self.resume(replica)
            self.restart(replica)
        self.world.connect_all()
