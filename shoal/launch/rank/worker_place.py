"""Where one rank is: what its launcher says, its host, its device, and its run directory."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from shoal.errors import BadInput, StrategyError
from shoal.launch.rank.environment import Placement
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.strategy.strategy import Strategy


def choose_device(device: str | None, placement: Placement | None) -> torch.device:
    """The GPU of this rank, one that ranks share where there are too few, or the CPU."""
    chosen = asked_device(device)
    gpus = possible_gpus(device)
    if not gpus:
        return chosen
    chosen = gpus[_position(placement) % len(gpus)]
    torch.cuda.set_device(chosen)
    return chosen


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


def _position(placement: Placement | None) -> int:
    """Among the ranks of this host; where that is not known, hosts are filled in order."""
    if placement is None:
        return 0
    return placement.local_rank if placement.knows_hosts else placement.rank


def choose_backend(device: torch.device, placement: Placement) -> str:
    """NCCL needs a GPU for each rank; Gloo serves CPUs, and ranks that share a GPU."""
    has_gpu_each = placement.has_gpu_each
    if has_gpu_each is None:
        has_gpu_each = placement.local_size <= torch.cuda.device_count()
    if device.type == "cuda" and has_gpu_each and dist.is_nccl_available():
        return "nccl"
    return "gloo"


class WorkerPlace:
    """`placement` and `device` are final when it is known which ranks share this host."""

    def __init__(self, strategy: Strategy, placement: Placement | None, config: RunConfig):
        self.placement = placement
        self.size = placement.size if placement else 1
        self.rank = placement.rank if placement else 0
        self.device = asked_device(config.device)
        self._strategy = strategy
        self._config = config
        self._is_settled = False
        if not self.asks_hosts:
            self.settle(placement)

    @property
    def asks_hosts(self) -> bool:
        """Whether the other ranks have to say first which of them are on this host."""
        if self.placement is None or self._is_settled:
            return False
        shares_gpus = self.placement.has_several_agents and self.device.type == "cuda"
        is_known = self.placement.knows_hosts and not shares_gpus
        return not is_known and self._strategy.sync_for(self.size).communicates

    def settle(self, placement: Placement | None) -> None:
        """Which ranks share this host is known now, as far as it ever is."""
        self._is_settled = True
        self.placement = placement
        self.device = choose_device(self._config.device, placement)
        _check_host(self._strategy, placement, self.device)

    @property
    def run_dir(self) -> RunDir | None:
        """The run directory, where Shoal's own launcher started this process."""
        is_ours = self.placement is not None and self.placement.launcher == "shoal"
        return self._config.run_dir if is_ours else None

    @property
    def report_dir(self) -> RunDir | None:
        """Where a launcher of Shoal, or its agent on this host, reads what this worker writes."""
        return self.run_dir or self._config.host_dir

    @property
    def local_rank(self) -> int:
        return self.placement.local_rank if self.placement else 0

    @property
    def local_size(self) -> int:
        return self.placement.local_size if self.placement else 1

    @property
    def comes_back(self) -> bool:
        """Whether the launcher starts lost workers again."""
        is_elastic = self._strategy.is_elastic  # there `GroupMembership` does all of it
        return self._config.takes_back and self._strategy.takes_back and not is_elastic

    @property
    def patience_s(self) -> float:
        """How long this worker waits for others."""
        return self._config.wait.limit_s or math.inf


def _check_host(strategy: Strategy, placement: Placement | None, device: torch.device) -> None:
    """Refuse, before anything starts, a device or placement that the strategy cannot use."""
    if placement is None or placement.size == 1:
        return
    term = strategy.sync_for(placement.size)
    is_cpu = device.type == "cpu"
    if term.collective_algorithm is not None and not is_cpu:
        raise BadInput(f"{term} runs on CPUs: on GPUs leave the algorithm to NCCL")
    strategy.check_hosts(placement.size, placement.local_size < placement.size)
    if term.needs_cpu and not is_cpu:
        raise StrategyError(
            f"{term.name} keeps the weights in memory that processes share, and {device} is not "
            "the CPU: run it with --device cpu"
        )
