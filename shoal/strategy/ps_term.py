"""The parameter server: its rules, where servers are, and their replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from shoal.errors import StrategyError
from shoal.strategy.base import SyncTerm
from shoal.strategy.options import COMPRESS, QUORUM, SYNC_OR_ASYNC, one_of, optional, whole

MAX_LAG = 64  # operations that the tail may be behind the head under consistency="eventual"
MAX_REPLICAS = 16  # each push passes through all of them, one after the other


@dataclass(frozen=True, kw_only=True)
class Ps(SyncTerm):
    """Servers hold the weights; workers push gradients and pull weights."""

    compared: ClassVar[tuple[str, ...]] = (
        "ps",
        "ps(quorum=0.75)",
        "ps(staleness=2)",
        'ps(mode="async")',
    )

    sync_module: ClassVar[str] = "shoal.sync.ps.plan"

    mode: Annotated[str, SYNC_OR_ASYNC] = "sync"
    quorum: Annotated[float | None, optional(QUORUM)] = None  # up to 1: a fraction; else a count
    late: Annotated[str, one_of("drop", "fold")] = "drop"
    staleness: Annotated[int | None, optional(whole(0))] = None
    servers: Annotated[int, whole(1)] = 1
    replicas: Annotated[int, whole(1, MAX_REPLICAS)] = 1  # of each server, in a chain
    consistency: Annotated[str, one_of("strong", "eventual")] = "strong"  # among replicas
    placement: Annotated[str, one_of("servers", "rank0", "workers")] = "servers"
    on: Annotated[str, one_of("cpu", "cuda")] = "cpu"  # where servers keep weights and update
    update: Annotated[str, one_of("server", "worker")] = "server"
    compress: Annotated[str | None, optional(COMPRESS)] = None

    @property
    def relaxations(self) -> list[str]:
        """The options given that let the server continue without waiting for every worker."""
        given = {"quorum": self.quorum is not None, "staleness": self.staleness is not None}
        given['mode="async"'] = self.mode == "async"
        return [option for option, is_given in given.items() if is_given]

    @property
    def adds_up(self) -> bool:
        return self.mode != "async"

    @property
    def who_waits(self) -> str:
        said = []
        if self.mode == "async":
            said.append("No worker waits: a push is taken when it comes, a pull gets what is there")
        if self.quorum is not None:
            late = "folded into the next" if self.late == "fold" else "dropped"
            said.append(
                f"An update waits for {self.quorum:g} of the workers; later pushes are {late}"
            )
        if self.staleness is not None:
            said.append(f"A worker waits where it is {self.staleness} steps ahead of the slowest")
        return "".join(f"{sentence}.\n" for sentence in said)

    @property
    def lockstep(self) -> bool:
        return not self.relaxations or self.staleness == 0

    @property
    def same_bits(self) -> bool:
        """Workers have pulled the same version, or updated by the same sums."""
        return self.lockstep

    @property
    def equals_single(self) -> bool:
        return self.lockstep and self.compress is None

    @property
    def survives_loss(self) -> bool:
        is_relaxed = self.mode == "async" or (self.quorum or 1) != 1 or bool(self.staleness)
        return is_relaxed and self.placement != "workers"

    starts_apart = takes_back = survives_loss

    def taking_back(self, replicas: int) -> Ps:
        """Where all are waited for: wait for those that are there."""
        waits_for_all = self.lockstep or self.quorum == 1
        is_apart = self.update == "server" and self.placement != "workers"
        if not (waits_for_all and is_apart and replicas > 1):
            return self
        return replace(self, staleness=None, quorum=replicas)

    @property
    def why_not_back(self) -> str | None:
        if self.update == "worker":
            return 'with update="worker" every worker has to see every sum; use update="server"'
        if self.placement == "workers":
            return (
                'with placement="workers" each worker hosts a server, which is lost with it; use '
                'placement="servers"'
            )
        return 'each step waits for all workers; use ps(quorum=…) or ps(mode="async")'

    has_servers = True

    @property
    def needs_first_replica(self) -> bool:
        return self.placement == "rank0"

    @property
    def server_processes(self) -> int:
        return self.servers * self.replicas if self.placement == "servers" else 0

    @property
    def why_no_server_processes(self) -> str:
        host = "worker 0 hosts the server" if self.placement == "rank0" else "each worker hosts one"
        return (
            f'with placement="{self.placement}" {host}; name the worker, or use '
            'placement="servers", the default'
        )

    @property
    def server_replicas(self) -> int:
        return self.replicas

    @property
    def server_consistency(self) -> str:
        return self.consistency

    @property
    def promise(self) -> str | None:
        if self.replicas == 1:
            return None
        if self.consistency == "strong":
            return (
                f"strong: a push is acknowledged when all {self.replicas} replicas of a server "
                "have it, and every pull sees it; no acknowledged push is lost while one of "
                "them lives"
            )
        return (
            f"eventual: a push is acknowledged when the first of {self.replicas} replicas of a "
            f"server has it; pulls may lack the last {MAX_LAG} pushes, and the loss of that "
            "replica may undo as many"
        )

    def in_own_loop(self) -> Ps:
        """Where all workers wait, servers add up: the script sees gradients before the update."""
        return replace(self, update="worker") if self.lockstep else self

    def check(self, replicas: int) -> None:
        if self.on == "cuda" and self.placement == "servers":
            raise StrategyError(
                'ps(on="cuda") puts servers on the GPUs of workers: add placement="rank0" or '
                'placement="workers"'
            )
        if self.quorum is not None and self.quorum > max(1, replicas):
            there = f"there {'is' if replicas == 1 else 'are'} {replicas}"
            raise StrategyError(
                f"ps: quorum={self.quorum} needs as many workers that push, and {there}; write a "
                "smaller number, or a fraction such as 0.75"
            )

    def check_server_saves(self, workers_of_replica: int) -> None:
        if self.update == "worker":
            raise StrategyError(
                f"--server-checkpoint saves what servers hold, and with {self} workers hold the "
                "weights: use job.save"
            )
        if workers_of_replica > 1:
            raise StrategyError(
                "--server-checkpoint needs whole replicas, and this strategy splits each of them "
                f"over {workers_of_replica} workers: use job.save"
            )

    def _check_options(self) -> None:
        """A reason for each pair of options that contradict each other."""
        relaxed = " and ".join(self.relaxations)
        weak = f'consistency="{self.consistency}"' if self.consistency != "strong" else ""
        copied = f"replicas={self.replicas}" if self.replicas > 1 else ""
        sees_all = "workers that update by themselves have to see every sum"
        contradictions = {
            f"{relaxed} exclude each other; each is a rule of its own for how long the server "
            "waits": len(self.relaxations) > 1,
            f'late="{self.late}" needs quorum; else nothing is ever late': (
                self.late != "drop" and self.quorum is None
            ),
            f'update="worker" and {relaxed} exclude each other; {sees_all}': (
                self.update == "worker" and not self.lockstep
            ),
            f'{copied} and on="{self.on}" exclude each other; the GPU of a worker ends with it, '
            "and replicas are processes of their own": copied and self.on != "cpu",
            f'{copied} and placement="{self.placement}" exclude each other; a replica has to '
            "outlive the process it copies, so each is a process of its own "
            '(placement="servers")': copied and self.placement != "servers",
            f"{weak} needs replicas, as in replicas=3; with one copy of the weights there is "
            "nothing that could lag": weak and not copied,
            f'{weak} and update="worker" (as in loops with job.setup) exclude each other; '
            f"{sees_all}, and the loss of a server may undo some": weak and self.update == "worker",
            f'servers={self.servers} and placement="rank0" exclude each other; rank 0 has room '
            "for one server": self.placement == "rank0" and self.servers > 1,
        }
        for why, is_so in contradictions.items():
            if is_so:
                raise StrategyError(f"ps: {why}")
