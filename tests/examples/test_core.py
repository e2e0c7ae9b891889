"""The core that one can read in an evening trains as one device does."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.core import train
from examples.core.flat import FlatModel
from examples.core.pipeline import one_f_one_b
from examples.core.ring import (
    contributions,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from examples.core.server import Server
from examples.core.world import World, run_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", [train.ddp, train.zero1, train.ps])
def test_replicas_train_as_one_device(strategy, replicas):
    assert_equal(strategy(replicas), train.single())


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_pipeline_trains_as_one_device(micro_batches):
    assert_equal(train.pipeline(micro_batches), train.single())


def assert_equal(trained, expected):
    torch.testing.assert_close(torch.tensor(trained.losses), torch.tensor(expected.losses))
    torch.testing.assert_close(trained.weights, expected.weights)


def test_the_single_device_is_plain_torch():
    model = train.make_model()
    optimizer = train.adam(list(model.parameters()))
    losses = []
    for step in range(train.STEPS):
        inputs, targets = train.batch_of(step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(torch.tensor(train.single().losses), torch.tensor(losses))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_ring_adds_every_contribution_once(ranks):
    everyone = Counter(range(ranks))
    reduced = contributions(ring_all_reduce(ranks), ranks)
    assert all(chunk == everyone for chunks in reduced for chunk in chunks)
    scattered = contributions(ring_reduce_scatter(ranks), ranks)
    assert all(scattered[rank][rank] == everyone for rank in range(ranks))
    gathered = contributions(ring_all_gather(ranks), ranks)
    assert all(
        gathered[rank][chunk] == {chunk: 1} for rank in range(ranks) for chunk in range(ranks)
    )


def test_a_ring_of_four_is_the_one_that_is_drawn():
    """`0 -c3-> 1 -c0-> 2`: each arrow has a sender and a chunk."""
    drawing = (ROOT / "examples/core/ring.py").read_text().split('"""')[1]
    drawn = [
        [(int(rank), int(chunk)) for rank, chunk in re.findall(r"(\d) -c(\d)->", line)]
        for line in drawing.splitlines()
        if "round" in line and "->" in line
    ]
    rounds = ring_reduce_scatter(4)
    assert [[(move.source, move.chunk) for move in transfers] for transfers in rounds] == drawn


def test_1f1b_is_the_one_that_is_drawn():
    def text(stage):
        actions = one_f_one_b(2, stage, micro_batches=4)
        return " ".join(f"{'F' if forward else 'B'}{index}" for forward, index in actions)

    drawing = (ROOT / "examples/core/pipeline.py").read_text()
    assert f"stage 0   {text(0)}  " in drawing
    assert f"stage 1      {text(1)}\n" in drawing


def test_a_push_that_comes_twice_counts_once():
    server = sgd_server(workers=2)
    for worker in (0, 0, 1, 1):
        server.push(worker, 0, torch.ones(3))
    assert server.pull(1).tolist() == [-2.0] * 3  # lr 1, the sum of two gradients


def test_no_worker_is_further_ahead_than_the_bound():
    server = sgd_server(workers=2, staleness=2)
    furthest = []

    def work(rank):
        for step in range(10):
            server.pull(step)
            furthest.append(step - server.ledger.complete_steps)
            server.push(rank, step, torch.ones(3))

    run_ranks(World(2), work)
    assert max(furthest) <= 2
    assert server.pull(10).tolist() == [-20.0] * 3


def sgd_server(workers, staleness=0):
    return Server(
        torch.zeros(3), lambda weights: torch.optim.SGD(weights, lr=1.0), workers, staleness
    )


def test_a_rank_that_fails_ends_the_others():
    world = World(2)

    def work(rank):
        if rank == 0:
            raise ValueError("no data")
        world.receive(0, 1)

    with pytest.raises(ValueError, match="no data"):
        run_ranks(world, work)


def test_buckets_are_complete_in_backward_last_layer_first():
    flat = FlatModel(train.make_model(), bucket_elements=400)
    complete = []
    flat.watch(lambda bucket: complete.append((bucket, flat.gradients[bucket].any().item())))
    flat.begin_step()
    inputs, targets = train.batch_of(0)
    train.loss_of(flat.model(inputs), targets).backward()
    assert complete == [(bucket, True) for bucket in flat.buckets]


def test_what_does_it_for_real_exists():
    named = [
        path
        for file in (ROOT / "examples/core").glob("*.py")
        for path in re.findall(r"shoal/[\w/.]*\w", file.read_text())
    ]
    assert len(named) >= 12
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_it_runs(capsys):
    train.main()
    assert capsys.readouterr().out.count("weights differ by") == 4
