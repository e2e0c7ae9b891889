"""This machine as training sees it, measured in each of several workers at the same time.

Run by `shoal cluster calibrate`, once for each number of workers. Rank 0 writes what it measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

import shoal
from shoal.cluster.host import watts
from shoal.comm.call import PeerMessage
from shoal.comm.group import Group
from shoal.observe.calibration.kernels import KernelBench, sample_rounds
from shoal.observe.calibration.measure import LEAST_S, RESULT
from shoal.strategy.strategy import as_strategy
from shoal.train.job import Job

KINDS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")
SIZES = (256, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_LARGE = 1 << 24  # fewer rounds from here on


def _have_time(job: shoal.Job, bench: KernelBench, section: str) -> bool:
    """Whether the first worker has: the others follow it."""
    has_time = torch.tensor([float(bench.has_time(section))])
    job.group.broadcast(has_time).wait()
    return bool(has_time)


def _calls(job: shoal.Job, bench: KernelBench, seconds: float) -> Iterator[dict[str, Any]]:
    """Every kind of call; V is the whole vector, of which a rank has 1/p where it is divided."""
    group = job.group
    round_s = seconds / len(KINDS) / len(SIZES) / _ROUNDS
    executor = "nccl" if job.device.type == "cuda" else "shm"
    for kind in KINDS:
        points: list[dict[str, Any]] = []
        for num_bytes in SIZES:
            if points and not _have_time(job, bench, f"{kind} by bytes"):
                continue
            pieces = max(1, num_bytes // 4 // group.size)
            whole = torch.zeros(pieces * group.size, device=job.device)
            part = torch.zeros(pieces, device=job.device)
            other = whole.clone()
            calls: dict[str, Callable[[], Any]] = {
                "all_reduce": partial(_wait, group.all_reduce, whole),
                "reduce": partial(_wait, group.reduce, whole),
                "reduce_scatter": partial(_wait, group.reduce_scatter, part, whole),
                "all_gather": partial(_wait, group.all_gather, whole, part),
                "broadcast": partial(_wait, group.broadcast, whole),
                "all_to_all": partial(_wait, group.all_to_all, other, whole),
                "send": partial(_exchange, group, whole, other),
            }
            points.append({"bytes": num_bytes, **_sample(group, calls[kind], round_s)})
        yield {"executor": executor, "kind": kind, "ranks": group.size, "points": points}


def _wait(call: Callable[..., Any], *tensors: Tensor) -> None:
    call(*tensors).wait()


def _sample(group: Group, call: Callable[[], Any], round_s: float) -> dict[str, float]:
    call()
    start_s = time.perf_counter()
    call()
    calls = torch.tensor([round_s / (time.perf_counter() - start_s)])
    group.broadcast(calls).wait()
    return _rounds(group, call, int(min(1000, max(1, float(calls)))))


def _rounds(group: Group, call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Seconds of one call, of which all ranks make as many in a round."""
    return sample_rounds(call, calls, _ROUNDS, lambda: group.barrier().wait())._asdict()


def _exchange(group: Group, mine: Tensor, theirs: Tensor) -> None:
    """Every rank sends to the next one while it receives from the one before."""
    sent = PeerMessage(mine, (group.rank + 1) % group.size)
    group.exchange([sent], [PeerMessage(theirs, (group.rank - 1) % group.size)]).wait()


_WORK_S = 5e-4  # of computation between two calls
_SIZE = 128
_NUMBERS = 1024
_CALLS = 40


def handover(group: Group) -> dict[str, Any]:
    """What it costs that workers wait for each other between pieces of computation.

    A call that is repeated at once finds all ranks awake. In a step they compute some hundred
    microseconds before it: a rank that waits has gone to sleep and is woken up, its threads too,
    and the slowest of all decides. Seconds of one piece of work, and of one with a call behind it:

        work         a rank computes
        meet         ranks compute, then sum a few numbers
        hand over    one of two ranks computes while the other waits for its message
    """
    matrix = torch.ones(_SIZE, _SIZE)
    message = torch.zeros(_NUMBERS)
    products = 1
    turn = 0
    partner = group.rank ^ 1

    def work() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def meet() -> None:
        work()
        group.all_reduce(message).wait()

    def hand_over() -> None:
        """In turns: a call of either rank of a pair is half of a round."""
        nonlocal turn
        if partner >= group.size:
            return
        turn ^= 1
        if turn == group.rank % 2:
            work()
            group.send(message, partner).wait()
        else:
            group.recv(message, partner).wait()

    work()
    start_s = time.perf_counter()
    for _ in range(_CALLS):
        work()
    agreed = torch.tensor([_WORK_S / max(1e-9, (time.perf_counter() - start_s) / _CALLS)])
    group.broadcast(agreed).wait()
    products = max(1, round(float(agreed)))
    ways = {"work": work, "meet": meet, "hand over": hand_over}
    return {name: _rounds(group, way, _CALLS) for name, way in ways.items()}


_STEPS = 50
_SERVED_STEPS = 20
_ROUNDS = 5
_PUSHES = 3
_LOCKSTEP = "ps"
_ASYNC = 'ps(mode="async")'
_BYTES = (1 << 20, 8 << 20, 64 << 20)
MOMENTUM = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


class Wide(nn.Module):
    """So many bytes of weights, whose gradient is written once."""

    def __init__(self, num_bytes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight.sum() * inputs.sum()


def served(job: shoal.Job, bench: KernelBench) -> dict[str, Any]:
    """Steps where a server holds the weights: of a tiny layer, and asynchronous ones by bytes."""
    pushes = [
        _push(job, num_bytes)
        for num_bytes in (_BYTES if job.device.type == "cpu" else ())
        if _have_time(job, bench, "pushes by bytes")
    ]
    tiny = partial(nn.Linear, 4, 4)
    return {
        "lockstep": _served(job, _LOCKSTEP, tiny(), _SERVED_STEPS),
        "async": _served(job, _ASYNC, tiny(), _SERVED_STEPS),
        "pushes": pushes,
    }


def _push(job: shoal.Job, num_bytes: int) -> dict[str, Any]:
    model = Wide(num_bytes)

    def compute() -> None:
        model.zero_grad(set_to_none=False)
        model(torch.ones(1)).backward()

    computed = _rounds(job.group, compute, _PUSHES)
    taken = _served(job, _ASYNC, model, _PUSHES)
    return {"bytes": num_bytes, "computed": computed, "async": taken}


def _served(job: shoal.Job, strategy: str, model: nn.Module, steps: int) -> dict[str, float]:
    with_server = Job(as_strategy(strategy), job.group, device=job.device)
    try:
        return _step(with_server, model.to(job.device), steps)
    finally:
        with_server.close()


def _step(job: shoal.Job, model: nn.Module, steps: int) -> dict[str, float]:
    step = job.step(model, _loss, optimizer=MOMENTUM)
    data = torch.ones(8 * job.size, 4)
    batch = next(iter(job.batches([(data, data)])))
    return _rounds(job.group, lambda: step(batch), steps)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets) if outputs.dim() else outputs


# sections of a KernelBench in their order, and what they take of the time, relative to each other
_SHARES = {"launches": 0.05, "updates": 0.1, "memory": 0.1, "named": 0.1, "products": 0.35}
_GPU_SHARES = {
    **{"launches": 0.02, "updates": 0.06, "memory": 0.03, "copies": 0.01, "products": 0.3},
    **{"named": 0.08, "attention": 0.1, "hosts": 0.26, "compiled": 0.14},
}
_OF_CALLS = 0.3  # of the time of several workers


def measure(job: shoal.Job, seconds: float) -> dict[str, Any]:
    is_cuda = job.device.type == "cuda"
    torch._functorch.config.donated_buffer = False  # backward of what is compiled runs many times
    bench = KernelBench(job.device, torch.cuda.synchronize if is_cuda else lambda: None)
    properties = torch.cuda.get_device_properties(job.device) if is_cuda else None
    alone = job.size == 1
    found: dict[str, Any] = {
        "workers": job.size,
        "threads": torch.get_num_threads(),
        "device": properties.name if properties else "cpu",
        "memory_bytes": properties.total_memory if properties else None,
        "watts": watts() if is_cuda else None,
        "step": _step(job, nn.Linear(4, 4).to(job.device), _STEPS),
    }
    shares = _GPU_SHARES if is_cuda else _SHARES
    ends_s = time.perf_counter() + seconds * (1.0 if alone else 1 - _OF_CALLS)
    left = sum(shares.values())
    for name, share in shares.items():  # one that took longer leaves less to all that follow
        now_s = time.perf_counter()
        section_s = max(0.0, ends_s - now_s) * share / left
        bench.ends_s = now_s + section_s
        left -= share
        found[name] = _together(job, getattr(bench, name), section_s)
    found["left_out"] = bench.left_out  # what follows counts there, too
    if not alone:
        bench.ends_s = ends_s + _OF_CALLS * seconds
        found["calls"] = list(_calls(job, bench, _OF_CALLS * seconds))
        if not is_cuda:
            found["handover"] = handover(job.group)
        found["served"] = served(job, bench)
    return found


def _together(job: shoal.Job, section: Callable[[float], Any], seconds: float) -> Any:
    """Begin when all workers do: they share memory, caches and turbo."""
    job.group.barrier().wait()
    return section(seconds)


def main() -> None:
    """Measure in this worker until a time of the host's clock; rank 0 prints what it has found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=float, required=True)
    until_s = parser.parse_args().until

    def train(job: shoal.Job) -> None:
        found = measure(job, max(LEAST_S, until_s - time.monotonic()))
        if job.rank == 0:
            print(f"{RESULT}{json.dumps(found)}", flush=True)

    shoal.run(train)


if __name__ == "__main__":
    main()
