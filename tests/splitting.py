"""Replicas that are split over workers, for tests: models, and training beside one worker."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.commands.examples.gpt import GPT, VOCABULARY, Size, adamw, next_token_loss
from shoal.errors import BadInput, NotBuilt
from shoal.strategy.strategy import parse
from shoal.train.checkpoints.state import gather_model
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests import models
from tests.conftest import World
from tests.seeds import seeded

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
ADAMW = partial(adamw, lr=1e-2)
GPT_OPTIONS: dict[str, Any] = {"optimizer": ADAMW, "clip_norm": 0.5, "loss": next_token_loss}
CPU = torch.device("cpu")


def workers(strategy: str) -> int:
    """How many it needs; two replicas where it has a term besides its splits."""
    splits = [int(n) for n in re.findall(r"\b(?:tp|pp|ep|cp)\((\d)", strategy)]
    is_one_replica = strategy == "single" or len(splits) == strategy.count(" + ") + 1
    return math.prod(splits) * (1 if is_one_replica else 2)


def model(**layers: tuple[int, int] | Callable[[], nn.Module]) -> Callable[..., type[nn.Module]]:
    """The class of models with this forward; a pair of widths is a Linear. Seeded with 0."""

    def class_of(forward: Callable[..., Any]) -> type[nn.Module]:
        @seeded(0)
        def build(self: nn.Module) -> None:
            nn.Module.__init__(self)
            for name, layer in layers.items():
                setattr(self, name, nn.Linear(*layer) if isinstance(layer, tuple) else layer())

        return type(forward.__name__, (nn.Module,), {"__init__": build, "forward": forward})

    return class_of


def linears(n: int, width: int = 6) -> Callable[[], nn.ModuleList]:
    return lambda: nn.ModuleList(nn.Linear(width, width) for _ in range(n))


@seeded(0)
def mlp() -> nn.Module:
    widths = [6, 10, 8, 9, 7, 8, 6, 9, 3]
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


@seeded(0)
def normed() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 7)),
        *(nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)),
    )


@seeded(0)
def gpt(layers: int = 4) -> nn.Module:
    return GPT(Size(layers, 8, 2, 6, 1e-2))


def texts(n: int, context: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (n, context), generator=generator)
    return TensorDataset(tokens, tokens.roll(-1, 1))


@contextmanager
def job_of(group: Group, strategy: str, model: nn.Module, **options: Any) -> Iterator[Any]:
    job = Job(parse(strategy), group, device=CPU, seed=3)
    loss = options.pop("loss", F.cross_entropy)
    try:
        yield job, job.step(model, loss, **{"optimizer": SGD, **options})
    finally:
        job.close()


def on_workers(
    world: World,
    strategy: str,
    make: Callable[[], nn.Module],
    body: Callable[[Job, Any], Any],
    **options: Any,
) -> list[Any]:
    """What `body(job, step)` returns on each worker of a strategy."""
    models = [make() for _ in range(options.pop("size", workers(strategy)))]

    def go(group: Group) -> Any:
        with job_of(group, strategy, models[group.rank], **options) as (job, step):
            return body(job, step)

    return world(len(models), go)


def whole(step: Step) -> dict[str, Tensor]:
    with step.sync.full_weights():
        return {name: tensor.clone() for name, tensor in gather_model(step)[0].items()}


def train(
    group: Group,
    strategy: str,
    model: nn.Module,
    data: Any,
    batch_size: int | None,
    epochs: int = 1,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    with job_of(group, strategy, model, **options) as (job, step):
        losses = [float(step(batch)) for batch in job.batches(data, batch_size, epochs=epochs)]
        return losses, whole(step)


Trained = tuple[Any, dict[str, Tensor]]  # losses, and the whole model, on the first worker


def assert_same(together: list[Trained], alone: Trained, exactly: bool = False) -> None:
    """What each worker has, which may be a shard of the model on all but the first, is alike."""
    assert list(together[0][1]) == list(alone[1])
    for rank, (losses, found) in enumerate(together):
        assert losses == (alone[0] if exactly else pytest.approx(alone[0], abs=2e-5))
        for name, tensor in alone[1].items():
            if rank and (name not in found or found[name].shape != tensor.shape):
                continue
            if exactly:
                assert torch.equal(found[name], tensor), name
            else:
                torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5)


def assert_equal(
    world: World,
    size: int,
    strategy: str,
    make: Callable[[], nn.Module],
    data: Any,
    batch_size: int | None = 8,
    exactly: bool = False,
    **options: Any,
) -> None:
    """Losses and the whole model are those of one worker."""
    models = [make() for _ in range(size)]
    alone = train(solo_group(), "single", make(), data, batch_size, **options)
    together = world(
        size, lambda g: train(g, strategy, models[g.rank], data, batch_size, **options)
    )
    assert_same(together, alone, exactly)


def refused(
    world: World,
    size: int,
    strategy: str,
    make: Callable[[], nn.Module],
    data: Any = None,
    **options: Any,
) -> str:
    """The sentence that refuses to build a step, or to train where there is data."""
    models = [make() for _ in range(size)]
    with pytest.raises((BadInput, NotBuilt)) as caught:
        world(size, lambda g: train(g, strategy, models[g.rank], data or [], 8, **options))
    return str(caught.value)


Script = Callable[[Job, nn.Module], Any]


def run(group: Group, strategy: str, model: nn.Module, script: Script) -> Trained:
    """What a script returns, and all models that it has trained, whole."""
    job = Job(parse(strategy), group, device=CPU, seed=3)
    try:
        result = script(job, model)
        with ExitStack() as stack:
            for step in job._steps:
                stack.enter_context(step.sync.full_weights())
            models = [gather_model(step)[0] for step in job._steps]
        return result, {f"{i}.{n}": t for i, model in enumerate(models) for n, t in model.items()}
    finally:
        job.close()


def assert_script_equal(
    world: World,
    size: int,
    strategy: str,
    script: Script,
    make: Callable[[], nn.Module] = models.mlp,
) -> None:
    made = [make() for _ in range(size)]
    alone = run(solo_group(), "single", make(), script)
    assert_same(world(size, lambda g: run(g, strategy, made[g.rank], script)), alone)


def assert_script_refused(
    world: World,
    strategy: str,
    script: Script,
    sentence: str,
    make: Callable[[], nn.Module] = models.mlp,
) -> None:
    """By each of two workers."""
    made = [make(), make()]

    def body(group: Group) -> None:
        with pytest.raises(BadInput, match=sentence):
            run(group, strategy, made[group.rank], script)

    world(2, body)


def update(*optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def assert_own_loop_equal(
    world: World, size: int, strategy: str, make: Callable[[], nn.Module], data: Any, loss: Any
) -> None:
    """A loop of the script's own, with two backward passes a step, trains as on one worker."""

    def script(job: Job, model: nn.Module) -> list[float]:
        model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for x, y in job.batches(data, 6):
            losses.append(float(job.backward(loss(model(x), y))))
            job.backward(0.5 * loss(model(x), y))
            losses.append(float(job.clip_grad_norm_(model, 0.5)))
            update(optimizer)
        return losses

    assert_script_equal(world, size, strategy, script, make)


def trained(
    world: World,
    strategy: str,
    make: Callable[[], nn.Module],
    data: Any,
    steps: int | None,
    load: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The whole model after so many steps, from a checkpoint or the start."""

    def go(job: Job, step: Step) -> dict[str, Tensor]:
        if load is not None:
            job.load(load)
        for batch in job.batches(data, 8, steps=steps):
            step(batch)
        if save is not None:
            job.save(save)
        return whole(step)

    return on_workers(world, strategy, make, go, **options)[0]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5)


def assert_each_goes_on(
    world: World,
    path: Path,
    chain: list[str],
    make: Callable[[], nn.Module],
    data: Any,
    **opts: Any,
) -> None:
    """Two steps under each, from what the one before has saved, are the steps of one worker."""
    found: dict[str, Tensor] = {}
    for n, strategy in enumerate(chain):
        load = path if n else None
        found = trained(world, strategy, make, data, 2 * n + 2, load, path, **opts)
    expected = trained(world, "single", make, data, 2 * len(chain), **opts)
    assert list(found) == list(expected)
    assert_close(found, expected)


def saved_bytes(model: nn.Module, train_step: Callable[[], Any]) -> int:
    """Of the activations that a forward keeps for its backward, parameters aside."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        train_step()
    return sum(s.nbytes() for at, s in kept.items() if at not in known)
