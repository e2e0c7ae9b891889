"""What a step takes on the host beside a plain loop, where one worker trains alone.

Counts follow from the program; how long they take does not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.comm.executors.solo import solo_group
from shoal.replica.flat_params import FlatParams
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.jobs import CPU
from tests.models import mlp, samples

ADAMW = partial(torch.optim.AdamW, lr=0.01)
ALONE = ["single", "ddp", "zero(1)", "zero(3)"]
_MOST_CALLS = 170  # of Python functions; at most 151 with Python 3.11
_DETACH = "aten.detach.default"
_CLONE = "aten.clone.default"
_LOOK = "aten._local_scalar_dense.default"  # at the loss, on a CPU only

Train = Callable[[], Any]


class Operations(TorchDispatchMode):
    """Counts those of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def plain() -> Train:
    model = mlp()
    optimizer = ADAMW(model.parameters(), fused=True)
    inputs, targets = samples(8).tensors

    def train() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return train


def by_step(strategy: str) -> Train:
    job = Job(parse(strategy), solo_group(), device=CPU)
    step = job.step(mlp(), F.cross_entropy, optimizer=ADAMW)
    batch = next(iter(job.batches([samples(8).tensors])))
    return lambda: step(batch)


def by_own_loop(strategy: str) -> Train:
    job = Job(parse(strategy), solo_group(), device=CPU)
    model = mlp()
    model, optimizer = job.setup(model, ADAMW(model.parameters(), fused=True))
    batches = iter(job.batches(repeat(samples(8).tensors, 100)))

    def train() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        job.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()

    return train


def operations(train: Train) -> Counter[str]:
    """Of one step, after the first ones."""
    for _ in range(3):
        train()
    with Operations() as operations:
        train()
    found = operations.found
    return Counter({name: n for name, n in found.items() if not name.startswith("profiler.")})


def python_calls(train: Train) -> int:
    for _ in range(3):
        train()
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        train()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("strategy", ALONE)
def test_a_step_adds_one_operation_to_those_of_a_plain_loop(strategy: str) -> None:
    assert operations(by_step(strategy)) - operations(plain()) == {_DETACH: 1, _LOOK: 1}


@pytest.mark.parametrize("strategy", ALONE)
def test_an_own_loop_adds_a_copy_of_the_loss(strategy: str) -> None:
    added = operations(by_own_loop(strategy)) - operations(plain())
    assert added == {_DETACH: 1, _CLONE: 1, _LOOK: 1}


@pytest.mark.parametrize("strategy", ALONE)
@pytest.mark.parametrize("train", [by_step, by_own_loop])
def test_few_python_functions_are_called(train: Callable[[str], Train], strategy: str) -> None:
    assert python_calls(train(strategy)) - python_calls(plain()) < _MOST_CALLS


def test_a_model_that_one_worker_trains_has_no_hooks() -> None:
    """torch.compile would end a graph at them."""
    job = Job(parse("ddp"), solo_group(), device=CPU)
    model = mlp()
    model, _ = job.setup(model, ADAMW(model.parameters()))
    hooks = [model._forward_hooks, model._forward_pre_hooks]
    hooks += [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    assert not any(hooks)


def test_flags_are_read_only_for_parameters_without_a_gradient_here() -> None:
    """Reading them would wait for the device in every step."""
    flat = FlatParams(mlp().named_parameters())
    flat.grads.watch(flat.buckets(1 << 20))
    flat.grads.arm(lambda bucket: None)
    for p in flat.params[1:]:
        p.grad = torch.ones_like(p)
    flat.grads.flush()
    of_all = range(len(flat.params))
    unreadable = torch.zeros(flat.header_size, device="meta")
    assert flat.grads.arrived(of_all[1:], unreadable) == set(of_all[1:])
    assert flat.grads.arrived(of_all, torch.zeros(flat.header_size)) == set(of_all[1:])
    assert flat.grads.arrived(of_all, torch.ones(flat.header_size)) == set(of_all)
