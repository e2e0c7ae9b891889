"""Workers of the simulated world: they push, pull, try again elsewhere, and start again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.server.chain.counters import Push, Resume
from tests.server.chain.history import NEVER
from tests.server.chain.network import MESSAGE_S

if TYPE_CHECKING:
    from tests.server.chain.world import World

RETRY_S = 0.012


def ignore(answer: Any) -> None:
    """The next push says whether it has worked."""


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
        self.call(self.head, "push", op, lambda answer: self.pushed(op, attempt, tried, answer))
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
        self.call(self.head, "push", Resume(op.worker, op.incarnation, op.sequence - 1), ignore)
        self.loop.after(2 * MESSAGE_S, self.try_push, op, attempt)

    # ------------------------------------------------------------------ pulls

    def pull(self) -> None:
        key = self.loop.rng.randrange(2)
        replica = self.loop.rng.randrange(self.world.replica_count)
        begun_s = self.loop.now_s
        attempt = self.attempt

        def pulled(answer: Any) -> None:
            if isinstance(answer, tuple) and attempt == self.attempt:
                self.world.note_read(key, answer[0], begun_s)
            self.next(attempt)

        self.call(replica, "read", key, pulled)
        self.loop.after(RETRY_S, lambda: pulled(None))

    def call(self, replica: int, method: str, argument: Any, answered: Any) -> None:
        call(self.world, replica, method, argument, answered)


class Reader:
    """Pulls from any replica, again and again."""

    def __init__(self, world: World):
        self.world = world
        self.loop = world.loop
        self.pull()

    def pull(self) -> None:
        if self.world.is_calm:
            return
        key = self.loop.rng.randrange(2)
        replica = self.loop.rng.randrange(self.world.replica_count)
        begun_s = self.loop.now_s

        def pulled(answer: Any) -> None:
            if isinstance(answer, tuple):
                self.world.note_read(key, answer[0], begun_s)

        call(self.world, replica, "read", key, pulled)
        self.loop.after(self.loop.soon(0.005), self.pull)


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
