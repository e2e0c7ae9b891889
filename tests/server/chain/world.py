"""A whole simulated world: replicas, coordinator, workers, and what goes wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.server.chain import Entry
from shoal.server.chain.messages import ChainMessage, SendSnapshot
from shoal.server.chain.node import ChainConsistency
from tests.server.chain.counters import Counters, Push
from tests.server.chain.history import NEVER, Added, Observed, contains, violation
from tests.server.chain.nemesis import FAULTS, Nemesis, Worker, keep_reading
from tests.server.chain.network import Loop, Network, Register, Requests
from tests.server.chain.replica import SNAPSHOT_S, Replica

CHAOS_S = 0.200
HEALING_S = 3.0


class Broken(AssertionError):
    """A promise was not kept."""


class World:
    """The schedule of a seed. `run` returns whether anything of the chain survived."""

    def __init__(
        self,
        seed: int,
        consistency: ChainConsistency = "strong",
        replica_type: type[Replica] = Replica,
        faults: tuple[str, ...] = FAULTS,
        max_weight: int = 4096,
    ):
        self.max_weight = max_weight  # operations that are kept for learners
        self.given_up = 0  # learners that fell too far behind
        self.loop = Loop(seed)
        rng = self.loop.rng
        self.consistency = consistency
        self.replica_count = rng.choice((2, 3, 3, 4))
        self.founders = tuple(range(rng.randint(1, self.replica_count)))
        self.network = Network(self.loop, is_ordered=rng.random() < 0.6)
        self.coordinator = Requests(self.loop, Register(self.loop), loss=rng.choice((0.0, 0.05)))
        self.replicas = [replica_type(self, number) for number in range(self.replica_count)]
        self.pushes: dict[Push, tuple[float, float]] = {}
        self.reads: dict[int, list[Observed]] = {0: [], 1: []}
        self.log: dict[int, Any] = {}  # what was committed at each position
        self.heads: dict[int, int] = {}  # who acknowledged in each epoch
        self.is_calm = False
        self._wire()
        self.nemesis = Nemesis(self, CHAOS_S, faults)
        self.workers = [Worker(self, number, pushes=5) for number in range(rng.randint(1, 3))]
        if rng.randint(0, 1):
            keep_reading(self)
        for replica in self.replicas:
            replica.start()
        self.connect_all()

    def _wire(self) -> None:
        self.network.deliver = self._deliver
        self.network.tell = self._tell
        self.network.may_connect = self._are_up

    # ------------------------------------------------------------------ between replicas

    def _deliver(self, sender: int, to: int, message: ChainMessage) -> None:
        replica = self.replicas[to]
        replica.process.run(replica.process.life, replica.receive, (sender, message))

    def _tell(self, end: int, other: int, is_up: bool) -> None:
        replica = self.replicas[end]
        replica.process.run(replica.process.life, replica.link_changed, (other, is_up))

    def _are_up(self, a: int, b: int) -> bool:
        return self.replicas[a].process.is_up and self.replicas[b].process.is_up

    def connect_all(self) -> None:
        for a in range(self.replica_count):
            for b in range(a):
                self.network.connect(a, b)

    def send_snapshot(self, sender: int, effect: SendSnapshot, state: Counters) -> None:
        """Over the connection of the two: lost with it."""
        link = self.network.link(sender, effect.to)
        life = self.network.life(link, effect.to)
        replica = self.replicas[effect.to]
        arguments = (effect.incarnation, effect.position, state)

        def arrive() -> None:
            if link.is_up and self.network.life(link, effect.to) == life:
                replica.process.run(replica.process.life, replica.install, arguments)

        self.loop.after(self.loop.soon(SNAPSHOT_S), arrive)

    def copies(self) -> int:
        """Of a request: mostly one."""
        x = self.loop.rng.random()
        return 1 if self.is_calm or x > 0.08 else 0 if x < 0.04 else 2

    # ------------------------------------------------------------------ what is promised

    def committed(self, replica: Replica, entry: Entry, is_counted: bool) -> None:
        if self.consistency == "eventual":
            return
        known = self.log.setdefault(entry.position, entry.op)
        if known != entry.op:
            raise Broken(f"replica {replica.me} commits {entry}; another has committed {known}")
        if not is_counted:
            raise Broken(f"{entry.op} is committed, but not the one before it")

    def acknowledged(self, replica: Replica) -> None:
        epoch = replica.node.epoch
        if self.heads.setdefault(epoch, replica.me) != replica.me:
            raise Broken(f"{self.heads[epoch]} and {replica.me} acknowledge in epoch {epoch}")

    def note_acknowledged(self, op: Push) -> None:
        self.pushes[op] = (self.pushes[op][0], self.loop.now_s)

    def note_read(self, key: int, value: int, begun_s: float) -> None:
        self.reads[key].append(Observed(value, begun_s, self.loop.now_s))

    def is_sound(self, member: int) -> bool:
        """Whether this member of the coordinator's configuration runs and is the one meant."""
        config = self.coordinator.store.config
        replica = self.replicas[member]
        is_meant = config is not None and config.has(member, replica.incarnation)
        return is_meant and replica.process.is_running

    @property
    def is_lost(self) -> bool:
        """Not one member is left: what they held is gone."""
        config = self.coordinator.store.config
        return config is not None and not any(self.is_sound(m) for m in config.members)

    def run(self) -> bool:
        self.loop.run(CHAOS_S)
        self.nemesis.end()
        self.is_calm = True
        for _ in range(int(HEALING_S / 0.01)):
            if self.loop.run(self.loop.now_s + 0.01) or self.is_lost or self.is_quiet:
                break
        if self.is_lost:
            return False
        self.check()
        return True

    @property
    def is_quiet(self) -> bool:
        """Workers are done, no read waits, and all replicas are members in the same place."""
        nodes = [replica.node for replica in self.replicas]
        places = {(n.epoch, n.position, n.committed) for n in nodes}
        is_settled = all(n.is_member and n.position == n.committed and not n.asked for n in nodes)
        is_settled &= all(replica.applied == replica.node.position for replica in self.replicas)
        are_done = all(w.is_done for w in self.workers) and not any(r.reads for r in self.replicas)
        return are_done and is_settled and len(places) == 1

    def check(self) -> None:
        if not self.is_quiet:
            raise Broken(f"no end: {[vars(r.node) for r in self.replicas]}")
        state = self.replicas[0].state
        for replica in self.replicas:
            if replica.state != state:
                raise Broken(f"replica {replica.me} differs: {replica.state}, {state}")
        if self.consistency == "strong":
            self._check_histories(state)
        else:
            self._check_losses(state)

    def _check_histories(self, state: Counters) -> None:
        for key, reads in self.reads.items():
            added = [Added(op.number, *times) for op, times in self.pushes.items() if op.key == key]
            final = Observed(state.sums[key], self.loop.now_s, self.loop.now_s)
            wrong = violation(added, [*reads, final])
            if wrong:
                raise Broken(f"key {key}: {wrong}")

    def _check_losses(self, state: Counters) -> None:
        """Acknowledged pushes may be missing, after a failover; they are counted when a worker
        says where it is, which its next push makes it do."""
        missing = [
            op
            for op, (_, returned_s) in self.pushes.items()
            if returned_s < NEVER and not contains(state.sums[op.key], op.number)
        ]
        for worker, (incarnation, sequence) in state.table.items():
            before = [op for op in missing if op[:2] == (worker, incarnation)]
            before = [op for op in before if op.sequence <= sequence]
            if len(before) != state.lost[worker]:
                raise Broken(f"{before} are missing, {state.lost[worker]} are counted as lost")
        if missing and len(self.coordinator.store.heads) == 1:
            raise Broken(f"{missing} are missing though the head has never changed")
        if any(total & 0xAAAAAAAAAAAAAAAA for total in state.sums):
            raise Broken(f"a push was applied twice: {state}")


def run_all(seeds: Iterable[int], **options: Any) -> int:
    """How many left a chain alive."""
    survived = 0
    for seed in seeds:
        try:
            survived += World(seed, **options).run()
        except AssertionError as error:
            raise Broken(f"seed {seed}, {options}: {error}") from None
    return survived


def first_broken(seeds: Iterable[int], **options: Any) -> str | None:
    """Why the first schedule that fails fails; None if none does."""
    try:
        run_all(seeds, **options)
    except Broken as error:
        return str(error)
    return None
