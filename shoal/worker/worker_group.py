"""The group of all ranks of a run, as one worker opens it.

one rank, or no collectives   alone
elastic                       formed when the model is built, again after each change
starts apart, or comes back   formed at the first collective
all others                    after the rendezvous of all ranks
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shoal.comm.executor import Executor
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.members.elastic_group import ElasticGroup
from shoal.comm.network import HostNetwork
from shoal.comm.select import DEFAULT_TIMEOUT_S, GroupSpec, open_group
from shoal.errors import BadInput, PeerLost, StrategyError
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.trust import key_of_host, require_protected, require_trusted_network
from shoal.runtime.waits import Periodic, waiting
from shoal.runtime.wording import say
from shoal.strategy.strategy import Strategy
from shoal.worker.environment import Placement, is_one_host
from shoal.worker.rendezvous import open_rendezvous, require_agent_store

if TYPE_CHECKING:
    from shoal.comm.members.board import Board
    from shoal.comm.members.membership import GroupMembership


def choose_device(device: str | None, placement: Placement | None) -> torch.device:
    """The GPU of this rank, one that ranks share where there are too few, or the CPU."""
    gpus = possible_gpus(device)
    if not gpus:
        return asked_device(device)
    position = 0  # among the ranks of this host; where that is not known, hosts are filled in order
    if placement is not None:
        position = placement.local_rank if placement.knows_hosts else placement.rank
    torch.cuda.set_device(gpus[position % len(gpus)])
    return gpus[position % len(gpus)]


def asked_device(device: str | None) -> torch.device:
    """As the user has named it, and as this host has it; without an index: whichever is free."""
    num_gpus = torch.cuda.device_count()
    name = device or ("cuda" if num_gpus else "cpu")
    try:
        asked = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"there is no device {name!r}: take cpu, cuda or cuda:N") from error
    if asked.type == "cuda" and not num_gpus:
        raise BadInput(f"device {name!r} was asked for, and PyTorch sees no CUDA GPU here")
    if asked.type == "cuda" and asked.index is not None and asked.index >= num_gpus:
        raise BadInput(f"device {name!r} was asked for, and there are {num_gpus} GPUs")
    return asked


def possible_gpus(device: str | None) -> list[torch.device]:
    """Those that `choose_device` chooses from, by the rank's number on its host."""
    chosen = asked_device(device)
    if chosen.type != "cuda":
        return []
    if chosen.index is not None:
        return [chosen]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def choose_backend(device: torch.device, placement: Placement) -> str:
    """NCCL needs a GPU for each rank; Gloo serves CPUs, and ranks that share a GPU."""
    has_gpu_each = placement.has_gpu_each
    if has_gpu_each is None:
        has_gpu_each = placement.local_size <= torch.cuda.device_count()
    if device.type == "cuda" and has_gpu_each and dist.is_nccl_available():
        return "nccl"
    return "gloo"


_POLL_S = 0.5
_UNTIL_KILLED_S = 5.0  # a launcher kills a stopped worker at the limit: before its peers give up


@dataclass(eq=False)
class WorkerGroup:
    """Where this rank is among the others, and the group that it opens with them.

    `placement` and `device` are final when it is known which ranks share this host. `fail` is
    called from another thread when a rank exits before it has joined.
    """

    _strategy: Strategy
    placement: Placement | None
    _config: RunConfig
    _number: int
    _fail: Callable[[Exception], None]

    def __post_init__(self) -> None:
        strategy = self._strategy
        placement = self.placement
        config = self._config
        self.rank, self.size = (placement.rank, placement.size) if placement else (0, 1)
        self.device = asked_device(config.device)
        self.membership: GroupMembership | None = None  # of an elastic run
        self.patience_s = config.wait.limit_s or math.inf  # how long it waits for others
        # of Shoal's own launcher, which starts lost workers again; GroupMembership: elastic ones
        is_ours = placement is not None and placement.launcher == "shoal"
        self.run_dir = config.run_dir if is_ours else None
        self.comes_back = config.takes_back and strategy.takes_back and not strategy.is_elastic
        self._term = strategy.sync_for(self.size)
        self._asks_hosts = False  # the other ranks have to say first which of them are here
        if placement is not None and self._term.communicates:
            shares_gpus = placement.has_several_agents and self.device.type == "cuda"
            self._asks_hosts = shares_gpus or not placement.knows_hosts
        if not self._asks_hosts:
            self._settle(placement)

    def _settle(self, placement: Placement | None) -> None:
        """Which ranks share this host is known now, as far as it ever is.

        Refuses, before anything starts, a device or placement that the strategy cannot use.
        """
        self.placement = placement
        self.device = choose_device(self._config.device, placement)
        if placement is None or placement.size == 1:
            return
        term = self._term
        is_cpu = self.device.type == "cpu"
        if term.collective_algorithm is not None and not is_cpu:
            raise BadInput(f"{term} runs on CPUs: on GPUs leave the algorithm to NCCL")
        self._strategy.check_hosts(placement.size, placement.local_size < placement.size)
        if term.needs_cpu and not is_cpu:
            raise StrategyError(
                f"{term.name} keeps the weights in memory that processes share, and {self.device} "
                "is not the CPU: run it with --device cpu"
            )

    @contextmanager
    def open(self) -> Iterator[Group]:
        run_dir = self.run_dir
        placement = self.placement
        if placement is None or not self._term.communicates:
            yield solo_group()
        elif self._strategy.is_elastic and (run_dir is not None or self._config.board is not None):
            with closing(self._make_elastic_group(run_dir)) as elastic:
                yield elastic
        elif run_dir is not None and (self._strategy.starts_apart or self.comes_back):
            from shoal.comm.executors.deferred import Deferred

            folder = run_dir.start_folder(self._number)
            with ExitStack() as stack:
                later = self._open_full_group(placement)

                def make() -> Executor:
                    if self._config.incarnation:
                        raise BadInput(
                            f"worker {self.rank} was started again, and the script exchanges "
                            "tensors between all workers, who met without it: run it without "
                            "--restart"
                        )
                    return stack.enter_context(later).executor

                yield Group(
                    Deferred(
                        folder, self.rank, self.size, run_dir.has_exited, make, self.comes_back
                    )
                )
        else:
            with self._open_full_group(placement) as group:
                if run_dir is not None:
                    run_dir.mark(run_dir.all_joined)
                yield group

    def _make_elastic_group(self, run_dir: RunDir | None) -> ElasticGroup:
        """A group that is formed when this worker has built its model."""
        from shoal.comm.members.board import FileBoard, GroupMember
        from shoal.comm.members.membership import GroupMembership

        me = GroupMember(self.rank, self._config.incarnation)
        hosts = nccl_store = None
        board: Board
        if run_dir is not None:
            if self.placement and choose_backend(self.device, self.placement) == "nccl":
                nccl_store = run_dir.nccl_store(self._number)
            board = FileBoard(run_dir.members(self._number), run_dir)
        else:
            from shoal.comm.members.network_board import open_board

            hosts = HostNetwork(self._config)
            hosts.require_native()
            board = open_board(self._config, me, self._number)
        patience_s = self.patience_s + _UNTIL_KILLED_S
        self.membership = GroupMembership(board, me, self.size, patience_s)
        limit_s = self._config.wait.limit_s or DEFAULT_TIMEOUT_S
        return ElasticGroup(self.membership, limit_s + _UNTIL_KILLED_S, hosts, nccl_store)

    @contextmanager
    def _open_full_group(self, placement: Placement) -> Iterator[Group]:
        """A group of all ranks; all of them have joined when the block begins."""
        require_agent_store(placement, self._config.environ)
        store: Store | None = None
        if self._asks_hosts:
            from shoal.worker.host_ranks import ask_hosts, meet

            with waiting(f"rank {self.rank}", "the other workers", "the rendezvous"):
                store = meet(placement, self._config, self.device.type == "cuda")
                gpus = possible_gpus(self._config.device)
                placement = ask_hosts(placement, self._config, self._number, store, gpus)
            self._settle(placement)
        opening = open_rendezvous(placement, self._config.environ)
        with opening as init_method, self._fail_when_peers_exit() as joined:
            spec = GroupSpec(
                rank=self.rank,
                size=self.size,
                init_method=init_method,
                backend=choose_backend(self.device, placement),
                name=f"run {self._number}",
                algorithm=self._term.collective_algorithm,
                replicas=self._strategy.layout(self.size).replicas,
                secret=self._check_network(placement),
                is_one_host=is_one_host(placement, self._config),
                timeout_s=self._config.wait.limit_s or DEFAULT_TIMEOUT_S,
                config=self._config,
                store=store,
                notices_losses=self._notices_losses(placement),
            )
            with ExitStack() as stack:
                with waiting(f"rank {self.rank}", "the other workers", "the rendezvous"):
                    group = stack.enter_context(open_group(spec))
                if self.device.type == "cuda":
                    group.executor.device = self.device
                if spec.notices_losses:
                    stack.enter_context(self._watch_nccl(group, spec.timeout_s))
                joined()
                yield group

    def _notices_losses(self, placement: Placement) -> bool:
        """Over NCCL. Where a strategy survives a loss, it finds out by itself."""
        is_nccl = choose_backend(self.device, placement) == "nccl"
        return is_nccl and not self._strategy.survives_loss

    def _watch_nccl(self, group: Group, limit_s: float) -> AbstractContextManager[Any]:
        from shoal.comm.executors.nccl import Nccl
        from shoal.comm.executors.nccl_watch import NcclWatch
        from shoal.comm.executors.torch import Torch

        nccl = group.executor
        if not isinstance(nccl, Nccl) or isinstance(nccl.host, Torch):
            return nullcontext()
        kills = self.run_dir is None  # Shoal's launcher does, when it has heard why a rank ends
        return NcclWatch(nccl.host, nccl.calls, self._end, limit_s, kills_stopped=kills)

    def _end(self, lost: PeerLost) -> None:
        """From another thread: no exception reaches a rank that waits for its GPU."""
        self._fail(lost)
        sys.stdout.flush()
        say(str(lost))
        os._exit(1)

    def _check_network(self, placement: Placement) -> bytes | None:
        """The key of the run; BadInput where hosts that are not trusted would reach it.

        The others may have a key, and would wait for this rank.
        """
        says = self.rank == 0
        try:
            if dist.is_initialized():
                return self._config.read_secret()
            if is_one_host(placement, self._config):
                return key_of_host(self._config)
            secret = require_protected(self._config, "the rendezvous of several hosts", says)
            HostNetwork(self._config).require_native()
            if choose_backend(self.device, placement) == "nccl":
                require_trusted_network(self._config, "NCCL between hosts", says)
            return secret
        except BadInput as error:
            if placement.launcher == "torchrun" and placement.rendezvous == "env://":
                from shoal.comm.store.authenticated import leave_with_agent

                leave_with_agent(self.rank, self.size, f"run {self._number}", str(error))
            raise BadInput(f"rank {self.rank}: {error}") from error

    @contextmanager
    def _fail_when_peers_exit(self) -> Iterator[Callable[[], None]]:
        """Until the yielded function is called: fail when a worker exits before it has joined."""
        run_dir = self.run_dir
        has_joined = threading.Event()
        if run_dir is None:
            yield has_joined.set
            return

        def look() -> None:
            exited = [rank for rank in range(self.size) if run_dir.has_exited(rank)]
            if exited and not has_joined.wait(_POLL_S):  # or it had joined and finished
                self._fail(PeerLost(self.rank, exited[0], "the rendezvous of all workers"))

        watcher = Periodic("shoal-rendezvous", _POLL_S, look)

        def stop() -> None:
            has_joined.set()
            watcher.close()

        watcher.start()
        try:
            yield stop
        finally:
            stop()
