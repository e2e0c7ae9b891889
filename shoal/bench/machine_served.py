"""What a parameter server of this host adds to a step, without bytes and by bytes.

    lockstep, async    a step of a model of one tiny layer
    pushes             asynchronous steps of models that compute next to nothing, by their bytes

A push and pull of some bytes takes a server's sum, its update and copies by server and worker, all
while as many workers as there are do the same. To count passes over memory says too little of it:
what caches hold, and what a core writes besides what it is asked to, differ between machines.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.bench.sampling import sample_rounds
from shoal.strategy.strategy import as_strategy
from shoal.train.job import Job

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


def tiny_step(job: shoal.Job, steps: int = _STEPS) -> dict[str, float]:
    """A step of a model of one tiny layer: what Shoal and the loop cost without the model."""
    return _step(job, nn.Linear(4, 4).to(job.device), steps, _ROUNDS)


def served(job: shoal.Job) -> dict[str, Any]:
    """Steps where a server holds the weights."""
    pushes = [_push(job, num_bytes) for num_bytes in _BYTES] if job.device.type == "cpu" else []
    tiny = partial(nn.Linear, 4, 4)
    return {
        "lockstep": _served(job, _LOCKSTEP, tiny(), _SERVED_STEPS),
        "async": _served(job, _ASYNC, tiny(), _SERVED_STEPS),
        "pushes": pushes,
    }


def _push(job: shoal.Job, num_bytes: int) -> dict[str, Any]:
    model = Wide(num_bytes)
    compute = partial(_compute, model)
    computed = sample_rounds(compute, _PUSHES, _ROUNDS, lambda: job.group.barrier().wait())
    taken = _served(job, _ASYNC, model, _PUSHES)
    return {"bytes": num_bytes, "computed": computed._asdict(), "async": taken}


def _compute(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)
    model(torch.ones(1)).backward()


def _served(job: shoal.Job, strategy: str, model: nn.Module, steps: int) -> dict[str, float]:
    with_server = Job(as_strategy(strategy), job.group, device=job.device)
    try:
        return _step(with_server, model.to(job.device), steps, _ROUNDS)
    finally:
        with_server.close()


def _step(job: shoal.Job, model: nn.Module, steps: int, rounds: int) -> dict[str, float]:
    step = job.step(model, _loss, optimizer=MOMENTUM)
    data = torch.ones(8 * job.size, 4)
    batch = next(iter(job.batches([(data, data)])))
    took = sample_rounds(lambda: step(batch), steps, rounds, lambda: job.group.barrier().wait())
    return took._asdict()


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() == 0:
        return outputs
    return nn.functional.mse_loss(outputs, targets)
