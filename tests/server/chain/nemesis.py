"""What goes wrong in the simulated world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.server.chain.register import TTL_S

if TYPE_CHECKING:
    from tests.server.chain.replica import Replica
    from tests.server.chain.world import World


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
