"""The engine of a stage: what lives when, what is sent, what is traced."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.replica.pipeline.split_backward import SplitBackward
from shoal.runtime.trace import Recorder
from shoal.schedules.pipelines.catalog import CATALOG, build
from shoal.schedules.pipelines.proof import prove
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from tests.conftest import World
from tests.models import samples
from tests.splitting import SGD, gpt, model, on_workers, texts


class Alive(nn.Sequential):
    """How many graphs of its layers are alive, and the most there were at once."""

    now = most = 0

    def begin(self, node: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        node.metadata["alive"] = marker = nn.Module()  # it is let go with the node
        weakref.finalize(marker, self.end)

    def end(self) -> None:
        self.now -= 1


class Watched(nn.Linear):
    on_graph: Any

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.grad_fn is not None:
            self.on_graph(out.grad_fn)
        return out


def peaks(world: World, strategy: str, layers: int) -> list[int]:
    def make() -> nn.Module:
        model = Alive(*(Watched(6, 6) for _ in range(layers)))
        for layer in model:
            layer.on_graph = model.begin
        return model

    def body(job: Job, step: Any) -> int:
        for batch in job.batches(samples(32, classes=6), 16):
            step(batch)
            assert step.model.now == 0
            if step.steps == 1:  # before it the first stage had a graph of the whole model
                step.model.most = 0
        return step.model.most

    return on_workers(world, strategy, make, body)


@pytest.mark.parametrize("schedule", list(CATALOG))
def test_as_many_activations_live_as_the_proof_says(world: World, schedule: str) -> None:
    pipeline = build(schedule, 3, 8)
    strategy = f'pp(3, schedule="{schedule}", microbatches=8)'
    found = peaks(world, strategy, layers=3 * pipeline.chunks)
    assert found == list(prove(pipeline).peak_live)


def test_recomputing_keeps_one_graph_at_a_time(world: World) -> None:
    for schedule in ("gpipe", "1f1b"):
        strategy = f'pp(3, schedule="{schedule}", microbatches=8, recompute=True)'
        assert peaks(world, strategy, 3) == [1, 1, 1]


def test_what_was_taken_is_let_go_during_the_step(world: World) -> None:
    """Of 16 micro-batches no more than a few are held for sending, under 1F1B."""

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

    def body(job: Job, step: Any) -> int:
        most = 0
        stage = step.engine.stage
        send = stage.send

        def counting(*args: Any) -> None:
            nonlocal most
            send(*args)
            most = max(most, sum(map(len, stage.held.values())))

        stage.send = counting
        for batch in job.batches(samples(32, classes=6), 32):
            step(batch)
        return most

    assert max(on_workers(world, "pp(3, microbatches=16)", make, body)) <= 2 * 3


def test_every_action_leaves_a_span(world: World) -> None:
    models = [nn.Sequential(*(nn.Linear(6, 6) for _ in range(2))) for _ in range(2)]

    def body(group: Group) -> list[str]:
        tracer = Recorder(group.rank, time.monotonic_ns())
        strategy = parse('pp(2, schedule="zb-h1", microbatches=2)')
        job = Job(strategy, group, device=torch.device("cpu"), services=RunServices(tracer=tracer))
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        for batch in job.batches(samples(8, classes=6), 8):
            step(batch)
        kinds = ("forward", "backward", "weight gradient", "send", "wait")
        return [f"{s.kind} {s.detail}" for s in tracer.spans if s.kind in kinds]

    first, last = world(2, body)
    assert first == [
        *("forward F0", "send F0", "forward F1", "send F1"),
        *("wait receive I0", "backward I0", "weight gradient W0"),
        *("wait receive I1", "backward I1", "weight gradient W1"),
    ]
    assert last == [
        *("wait receive F0", "forward F0", "backward I0", "send I0"),
        *("wait receive F1", "forward F1", "backward I1", "send I1"),
        *("weight gradient W0", "weight gradient W1"),
    ]


# ---- input gradients and weight gradients together are the backward ------------------------------


@model(layer=(4, 4))
def twice(self: Any, x: Tensor) -> Tensor:
    """One layer in two places."""
    return self.layer(torch.tanh(self.layer(x)))


@model(first=(4, 4), second=lambda: nn.Linear(4, 4, bias=False), unused=(4, 4))
def skipping(self: Any, x: Tensor) -> Tensor:
    first, second = self.first(x * self.first.bias).chunk(2, dim=1)
    return x + self.second(torch.cat([second, first.exp()], dim=1))


@model(lstm=lambda: nn.LSTM(2, 3, batch_first=True))
def lstm(self: Any, x: Tensor) -> Tensor:
    return self.lstm(x.unflatten(1, (2, 2)))[0]


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4)),
    "one parameter": lambda: nn.Linear(4, 4, bias=False),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    **{"lstm": lstm, "used twice": twice, "skipping": skipping},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("with_input", [True, False])
def test_halves_add_up_to_a_backward(name: str, with_input: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(3, 4, requires_grad=with_input)
    out = model(x)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted = {n: p.grad for n, p in model.named_parameters()}

    split = SplitBackward([model(x)], [grad])
    leaves = split.input_grads([x] if with_input else [])
    if with_input:
        torch.testing.assert_close(leaves[0], x.grad)
    found = {id(p): g for p, g in split.weight_grads()}
    assert len(found) == sum(g is not None for g in wanted.values())
    for n, p in model.named_parameters():
        if wanted[n] is not None:
            torch.testing.assert_close(found[id(p)], wanted[n])


def test_a_gpt_with_tied_embedding() -> None:
    model = gpt(2)
    tokens = texts(2).tensors[0]

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    loss().backward()
    split = SplitBackward([loss()], [None])
    assert split.input_grads([]) == []
    found = {id(p): g for p, g in split.weight_grads()}
    for p in model.parameters():
        torch.testing.assert_close(found[id(p)], p.grad)


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Counted.calls += 1
        return grad


def test_the_second_half_does_not_repeat_the_first() -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    x = torch.randn(2, 4, requires_grad=True)
    out = x
    for layer in layers:
        out = Counted.apply(layer(out))
    Counted.calls = 0
    split = SplitBackward([out.sum()], [None])
    split.input_grads([x])
    assert Counted.calls == 3
    assert len(split.weight_grads()) == 6
    assert Counted.calls == 3
