"""What calls between workers cost: collectives by kind, executor and algorithm, and sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.bench.collectives import by_torch
from shoal.bench.sampling import Sample, sample_rounds
from shoal.comm.group import Group

KINDS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "send",
)
SIZES = (256, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_ROUNDS = 5
_LARGE = 1 << 24  # fewer rounds from here on


class CallBench:
    def __init__(self, job: shoal.Job, seconds: float):
        self._group: Group = job.group
        self._device = job.device
        self._executor = "nccl" if job.device.type == "cuda" else "shm"
        self._round_s = seconds / (len(KINDS) + 1) / len(SIZES) / _ROUNDS

    def measure(self) -> list[dict[str, Any]]:
        return list(self._calls())

    def _calls(self) -> Iterator[dict[str, Any]]:
        for kind in KINDS:
            yield self._measure(self._executor, kind, partial(self._native, kind))
        if self._device.type == "cpu" and dist.is_gloo_available():
            yield self._measure("gloo", "all_reduce", self._gloo)

    def _measure(
        self, executor: str, kind: str, make: Callable[[int], Callable[[], Any]]
    ) -> dict[str, Any]:
        points = []
        for num_bytes in SIZES:
            took = self._sample(make(num_bytes))
            points.append({"bytes": num_bytes, **took._asdict()})
        ranks = self._group.size
        return {"executor": executor, "kind": kind, "ranks": ranks, "points": points}

    def _native(self, kind: str, num_bytes: int) -> Callable[[], Any]:
        """One call; V is the whole vector, of which a rank has 1/p where it is divided."""
        group = self._group
        pieces = max(1, num_bytes // 4 // group.size)
        whole = torch.zeros(pieces * group.size, device=self._device)
        part = torch.zeros(pieces, device=self._device)
        other = whole.clone()
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: group.all_reduce(whole).wait(),
            "reduce": lambda: group.reduce(whole).wait(),
            "reduce_scatter": lambda: group.reduce_scatter(part, whole).wait(),
            "all_gather": lambda: group.all_gather(whole, part).wait(),
            "broadcast": lambda: group.broadcast(whole).wait(),
            "all_to_all": lambda: group.all_to_all(other, whole).wait(),
            "send": lambda: _exchange(group, whole, other),
        }
        return calls[kind]

    def _gloo(self, num_bytes: int) -> Callable[[], Any]:
        data = torch.zeros(num_bytes // 4)
        return by_torch(dist.group.WORLD, "all_reduce", data, data)

    def _sample(self, call: Callable[[], Any]) -> Sample:
        call()
        start_s = time.perf_counter()
        call()
        calls = torch.tensor([self._round_s / (time.perf_counter() - start_s)])
        self._group.broadcast(calls).wait()
        number = int(min(1000, max(1, float(calls))))
        return sample_rounds(call, number, _ROUNDS, lambda: self._group.barrier().wait())


def _exchange(group: Group, mine: Tensor, theirs: Tensor) -> None:
    """Every rank sends to the next one while it receives from the one before."""
    sent = group.send(mine, (group.rank + 1) % group.size)
    group.recv(theirs, (group.rank - 1) % group.size).wait()
    sent.wait()
