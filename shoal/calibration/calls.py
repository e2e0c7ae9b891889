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
from shoal.calibration.sampling import Sample, sample_rounds
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
        return lambda: dist.all_reduce(data)

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


_WORK_S = 5e-4  # of computation between two calls
_SIZE = 128
_NUMBERS = 1024
_CALLS = 40


class HandoverBench:
    """What it costs that workers wait for each other between pieces of computation.

    A call that is repeated at once finds all ranks awake. In a step they compute some hundred
    microseconds before it: a rank that waits has gone to sleep and is woken up, its threads too,
    and the slowest of all decides.

        work         a rank computes
        meet         ranks compute, then sum a few numbers
        hand over    one of two ranks computes while the other waits for its message
    """

    def __init__(self, group: Group):
        self._group = group
        self._matrix = torch.ones(_SIZE, _SIZE)
        self._message = torch.zeros(_NUMBERS)
        self._products = 1
        self._turn = 0

    def measure(self) -> dict[str, Any]:
        """Seconds of one piece of work, and of one with a call behind it."""
        self._products = self._agree(self._products_of_work())
        ways = {"work": self._work, "meet": self._meet, "hand over": self._hand_over}
        return {name: self._sample(way) for name, way in ways.items()}

    def _products_of_work(self) -> float:
        self._work()
        start_s = time.perf_counter()
        for _ in range(_CALLS):
            self._work()
        return _WORK_S / max(1e-9, (time.perf_counter() - start_s) / _CALLS)

    def _agree(self, number: float) -> int:
        numbers = torch.tensor([number])
        self._group.broadcast(numbers).wait()
        return max(1, round(float(numbers)))

    def _sample(self, way: Callable[[], None]) -> dict[str, float]:
        took = sample_rounds(way, _CALLS, _ROUNDS, lambda: self._group.barrier().wait())
        return took._asdict()

    def _work(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)

    def _meet(self) -> None:
        self._work()
        self._group.all_reduce(self._message).wait()

    def _hand_over(self) -> None:
        """In turns: a call of either rank of a pair is half of a round."""
        partner = self._group.rank ^ 1
        if partner >= self._group.size:
            return
        self._turn ^= 1
        if self._turn == self._group.rank % 2:
            self._work()
            self._group.send(self._message, partner).wait()
        else:
            self._group.recv(self._message, partner).wait()
