"""Gossip: who sends what to whom, what it converges to, and what is saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.commands.examples import digits
from shoal.errors import BadInput
from shoal.runtime.trace import MIX, Recorder
from shoal.schedules.mixing import mixing_for
from shoal.strategy.strategy import parse
from shoal.sync import gossip
from shoal.sync.gossip import MixInPlace, Neighbours
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from shoal.train.step.step import Step
from tests.conftest import World
from tests.jobs import CPU, after_training
from tests.models import convnet, samples
from tests.test_equal import Halting

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
IN_PLACE = "gossip(shared_weights=True)"


# ---- mixing alone -------------------------------------------------------------------------------
@pytest.mark.parametrize("graph", ["ring", "torus", "exponential", "star", "one-peer"])
def test_mixing_contracts_by_the_second_eigenvalue_and_keeps_the_mean(
    world: World, graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By messages, in several chunks: the replicas are what the matrices say, step by step."""
    monkeypatch.setattr(gossip, "MIXING_CHUNK_BYTES", 256)
    size = 6
    steps = 12
    mixing = mixing_for(graph, size)
    start = torch.randn(size, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def body(group: Group) -> Tensor:
        neighbours = Neighbours(group, mixing)
        data = start[group.rank].clone()
        for step in range(steps):
            neighbours.mix(data, step)
        return data

    found = torch.stack(world(size, body))
    expected = start
    for step in range(steps):
        expected = torch.from_numpy(mixing.at(step)) @ expected
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.mean(0), start.mean(0), rtol=0, atol=1e-12)
    shrunk = (found - start.mean(0)).norm() / (start - start.mean(0)).norm()
    assert shrunk <= mixing.second_eigenvalue**steps * (4 if graph == "one-peer" else 1) + 1e-12


# ---- bytes --------------------------------------------------------------------------------------
def bytes_a_step(world: World, size: int, strategy: str) -> list[float]:
    def look(job: Job, step: Any, losses: Any) -> float:
        job.evaluate(F.cross_entropy, samples(8))  # no part of training
        each: float = step.sync.report()["bytes_per_step"]
        return each

    return after_training(world, size, strategy, look, data=samples(64), batch_size=32, epochs=2)


@pytest.mark.parametrize("size", [4, 8])
def test_bytes_of_a_ring_do_not_grow_with_the_workers_and_those_of_a_star_do_at_its_root(
    world: World, size: int
) -> None:
    padded = 4 * 400  # 355 parameters, each tensor from a cache line on, and the loss
    assert bytes_a_step(world, size, "gossip") == [2 * padded] * size
    star = bytes_a_step(world, size, 'gossip(graph="star")')
    assert star == [(size - 1) * padded] + [padded] * (size - 1)


# ---- training -----------------------------------------------------------------------------------
def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def accuracies(world: World, strategy: str) -> tuple[list[float], list[dict[str, Any]]]:
    """After 4 epochs of digits on 4 workers, as each of them tells it; and their reports."""
    train_set, test_set = digits.load_digits()

    def look(job: Job, step: Any, losses: Any) -> tuple[float, dict[str, Any]]:
        return job.evaluate(digits.metrics, test_set)["accuracy"], step.sync.report()

    options: Any = {"make": perceptron, "data": train_set, "batch_size": 64, "epochs": 4}
    found = after_training(world, 4, strategy, look, optimizer=SGD, **options)
    return [accuracy for accuracy, _ in found], [report for _, report in found]


@pytest.mark.whole
def test_sparse_graphs_reach_the_accuracy_of_ddp(world: World) -> None:
    together, _ = accuracies(world, "ddp")
    assert together[0] > 0.9
    for graph in ("ring", "torus", "exponential"):
        found, reports = accuracies(world, f'gossip(graph="{graph}")')
        assert found == [found[0]] * 4  # everyone tests the mean of all replicas
        assert found[0] > together[0] - 0.01
        distances = reports[0]["consensus_distance"]
        assert [step for step, _ in distances] == [50]
        assert 0 < distances[0][1] < 1


def test_the_loss_is_that_of_the_neighbours_samples(world: World) -> None:
    """In the first step all replicas are equal: the mean over all of them is the global loss."""
    options: Any = {"data": samples(40), "batch_size": 40}
    alike = [losses[0] for losses in after_training(world, 5, "gossip", **options)]
    whole = after_training(world, 5, "ddp", **options)
    assert sum(alike) / 5 == pytest.approx(whole[0][0], abs=1e-6)
    assert len(set(alike)) == 5


@pytest.mark.parametrize("graph", ["ring", "star", "one-peer", "exponential", "edges:0-1,1-2,2-3"])
def test_weights_that_are_read_in_place_are_those_of_messages_to_the_last_bit(
    world: World, graph: str
) -> None:
    def trained(shares: bool) -> list[Any]:
        def look(job: Job, step: Any, losses: list[float]) -> Any:
            assert isinstance(step.sync, MixInPlace) is shares
            return losses, step.flat.data.clone(), step.sync.report()

        strategy = f'gossip(graph="{graph}", shared_weights={shares})'
        return after_training(world, 4, strategy, look, data=samples(80), optimizer=SGD)

    for (losses, weights, told), expected in zip(trained(True), trained(False), strict=True):
        assert losses == expected[0]
        assert torch.equal(weights, expected[1])
        assert told == expected[2]


@pytest.mark.parametrize("strategy", ["gossip", 'gossip(mode="async")', IN_PLACE])
def test_batchnorm_is_each_replicas_own_and_its_mean_is_evaluated(
    world: World, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    def look(job: Job, step: Any, losses: Any) -> tuple[list[Tensor], list[Tensor]]:
        buffers = [b for b in step.model.buffers() if b.is_floating_point()]
        own = [b.clone() for b in buffers]
        with step.sync.full_weights():
            mean = [b.clone() for b in buffers]
        assert all(map(torch.equal, own, buffers))
        return own, mean

    found = after_training(world, 4, strategy, look, make=convnet, data=samples(48, (1, 4, 4)))
    assert not torch.equal(found[0][0][0], found[1][0][0])
    for i, mean in enumerate(found[2][1]):
        torch.testing.assert_close(mean, torch.stack([own[i] for own, _ in found]).mean(0))
    assert "BatchNorm uses each replica's own samples" in capsys.readouterr().err


# ---- saving -------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["gossip", "localsgd(every=4)", IN_PLACE])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_a_checkpoint_holds_the_mean_and_training_goes_on_from_where_it_was(
    world: World, tmp_path: Path, optimizer: Any, strategy: str
) -> None:
    def save(job: Job, step: Step, losses: Any) -> tuple[Tensor, list[Tensor]]:
        before, states = state_of(job, step, losses)
        job.save(tmp_path / "model")
        after, states_after = state_of(job, step, losses)
        assert torch.equal(after, before) and all(map(torch.equal, states, states_after))
        return before, states

    after = partial(after_training, world, 4, strategy, optimizer=optimizer)
    found = after(save)
    mean = torch.stack([weights for weights, _ in found]).mean(0)
    assert not torch.equal(found[0][0], found[1][0])
    for weights, states in after(state_of, load=tmp_path / "model"):  # no batch is left
        torch.testing.assert_close(weights, mean)
        for i, state in enumerate(states):
            torch.testing.assert_close(state, torch.stack([s[i] for _, s in found]).mean(0))


def state_of(job: Job, step: Step, losses: Any) -> tuple[Tensor, list[Tensor]]:
    state = step.update.optimizer.state
    held = [t for p in step.flat.params for _, t in sorted(state[p].items()) if t is not None]
    return step.flat.data.clone(), [t.clone() for t in held]


def test_a_state_that_not_all_replicas_have_stays_out_of_the_mean(world: World) -> None:
    x = torch.zeros(8, 6)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    x[:2, 0] = 10.0  # rank 0 alone uses the second layer

    def look(job: Job, step: Step, losses: Any) -> int:
        with step.sync.full_weights(optimizer=True):
            states = step.update.optimizer.state.values()
            return sum(t is not None for s in states for t in s.values())

    options: Any = {"make": Halting, "data": [(x, y)], "batch_size": None, "optimizer": SGD}
    assert after_training(world, 4, "gossip", look, **options) == [4, 2, 2, 2]


# ---- what is said and refused -------------------------------------------------------------------
def test_what_to_expect_is_said_once_and_the_distance_between_replicas_is_traced(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gossip, "MEASURE_EVERY", 3)  # and early, with a trace

    def look(job: Job, step: Step, losses: Any) -> list[str]:
        report = step.sync.report()["consensus_distance"]
        assert [at for at, _ in report] == [1, 3]
        assert step.sync.summary()[0].startswith("gossip: replicas were ")
        return [s.detail for s in tracers[job.rank].spans if "consensus" in s.detail]

    tracers = [Recorder(rank, 0) for rank in range(4)]
    services = [RunServices(tracer=tracer) for tracer in tracers]
    details = after_training(world, 4, "gossip", look, data=samples(64), services=services)
    assert len(details[0]) == 2 and details[0][0].startswith("consensus distance 0.")
    assert capsys.readouterr().err.count("ring of 4: a worker averages with 2 others a step") == 1


@pytest.mark.parametrize(
    ("strategy", "spans"),
    [
        ("gossip", 4),
        ('gossip(graph="complete")', 4),
        ('gossip(mode="async")', 4),
        ("localsgd(every=2)", 2),
    ],
)
def test_averaging_is_traced_as_mixing(world: World, strategy: str, spans: int) -> None:
    tracers = [Recorder(rank, 0) for rank in range(4)]
    services = [RunServices(tracer=tracer) for tracer in tracers]
    after_training(world, 4, strategy, data=samples(64), services=services)
    for tracer in tracers:
        mixed = [span for span in tracer.spans if span.kind == MIX]
        assert [span.track for span in mixed] == ["main"] * spans
        assert all(bool(span.bytes) == ("async" in strategy) for span in mixed)


def test_a_graph_that_differs_between_ranks_is_refused(world: World, tmp_path: Path) -> None:
    for rank in range(4):
        lines = "0 1\n1 2\n2 3\n3 0\n" + "0 2\n" * (rank == 3)
        (tmp_path / f"{rank}.txt").write_text(lines)

    def body(group: Group) -> None:
        job = Job(parse(f'gossip(graph="{tmp_path}/{group.rank}.txt")'), group, device=CPU)
        job.step(nn.Linear(6, 3), F.cross_entropy, optimizer=SGD)

    with pytest.raises(BadInput, match="not all ranks have the same graph"):
        world(4, body)
