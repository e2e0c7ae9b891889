"""shoal.Embedding under ps: rows on servers train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.server.process.server import Server
from shoal.server.rows.client import ServerTable
from shoal.strategy.strategy import parse
from shoal.train.checkpoints.files import read_manifest
from shoal.train.job import Job
from tests.conftest import World
from tests.seeds import seeded
from tests.server.helpers import launched

CPU = torch.device("cpu")
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01, eps=1e-3),
}


class Clicks(nn.Module):
    @seeded(0)
    def __init__(self, optimizer: Any, **options: Any) -> None:
        super().__init__()
        self.rows = shoal.Embedding(50, 4, padding_idx=3, optimizer=optimizer, **options)
        self.out = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.rows(ids).mean(1))
        return out


def data(n: int = 46) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    ids = (50 * torch.rand(n, 3, generator=generator) ** 2).long()  # some often, some never
    return TensorDataset(ids, torch.randint(0, 3, (n,), generator=generator))


def go(
    group: Group,
    strategy: str,
    model: Clicks,
    load: Path | None = None,
    save: Path | None = None,
    at_end: Callable[[], None] = lambda: None,
    **options: Any,
) -> tuple[list[float], Tensor, Tensor]:
    job = Job(parse(strategy), group, device=CPU, seed=3)
    step = job.step(model, F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1), **options)
    if load is not None:
        job.load(load)
    losses = [float(step(b)) for b in job.batches(data(), 11, epochs=2, steps=5 if save else None)]
    if save is not None:
        job.save(save)
    with step.sync.full_weights():
        rows = model.rows(torch.arange(50)).detach().clone()
    weight = model.out.weight.detach().clone()
    group.barrier().wait()  # all workers have read the rows: the servers may end
    at_end()
    job.close()
    return losses, rows, weight


@pytest.mark.product
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("count", "size"), [(1, 2), (2, 3), (3, 4)])
def test_rows_on_servers_train_as_on_one_device(
    world: World, monkeypatch: pytest.MonkeyPatch, count: int, size: int, optimizer: str
) -> None:
    models = [Clicks(OPTIMIZERS[optimizer]) for _ in range(size + 1)]
    options = {"lr": lambda step: 0.1 / (1 + step), "accumulate": 2}
    alone = go(solo_group(), "single", models[-1], **options)
    with launched(monkeypatch, count):
        strategy = f"ps(servers={count})"
        found = world(size, lambda g: go(g, strategy, models[g.rank], **options))
    for losses, rows, weight in found:
        assert losses == pytest.approx(alone[0], abs=2e-5)
        torch.testing.assert_close(rows, alone[1], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(weight, alone[2], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("placement", ["hash", "range"])
def test_rows_come_and_go_on_servers_as_on_one_device(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, placement: str
) -> None:
    """Also over a checkpoint: saved on servers, loaded on one device, and the other way round."""
    options: Any = {"min_count": 3, "ttl_steps": 2, "placement": placement}
    models = [Clicks(OPTIMIZERS["adagrad"], **options) for _ in range(7)]
    _, expected, _ = go(solo_group(), "single", models[0])
    go(solo_group(), "single", models[1], save=tmp_path / "single")
    with launched(monkeypatch, 2):
        found = world(2, lambda g: go(g, "ps(servers=2)", models[2 + g.rank]))
    with launched(monkeypatch, 3):
        ps = "ps(servers=3)"
        world(2, lambda g: go(g, ps, models[4 + g.rank], tmp_path / "single", tmp_path / "ps"))
    resumed = go(solo_group(), "single", models[6], tmp_path / "ps")
    for _, rows, _ in [*found, resumed]:
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=2e-5)
    start = models[0].rows.spec.initial(torch.arange(50))
    is_trained = (expected - start).abs().amax(1) > 0
    is_trained[3] = False
    assert is_trained.any() and not is_trained.all()
    assert len(models[0].rows.state()["ids"]) == int(is_trained.sum())


# ------------------------------------------------------------------------------ copies of hot rows

HOT = {"hot_share": 0.04, "placement": "range"}


def copies_served(found: list[Server]) -> int:
    """Rows that servers have answered from their copies."""
    tables = [model.tables.hot["rows"] for server in found for model in server.models.values()]
    return sum(int(hot.report()["served"] - hot.report()["by_owner"][hot.index]) for hot in tables)


@pytest.mark.parametrize("options", [{}, {"min_count": 2, "ttl_steps": 2}], ids=["", "come and go"])
def test_copies_of_hot_rows_leave_synchronous_training_as_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    """Bit for bit: with copies as without."""

    def train(**more: Any) -> tuple[list[Any], int]:
        models = [Clicks(OPTIMIZERS["adagrad"], **options, **more) for _ in range(2)]
        served: list[int] = []
        with launched(monkeypatch, 2) as found:

            def go_and_look(group: Group) -> Any:
                def look() -> None:
                    if group.rank == 0:
                        served.append(copies_served(found))
                    group.barrier().wait()

                return go(group, "ps(servers=2)", models[group.rank], at_end=look)

            return world(2, go_and_look), served[0]

    expected, none = train()
    results, served = train(**HOT)
    assert none == 0 and served > 10
    for (losses, rows, _), (expected_losses, expected_rows, _) in zip(
        results, expected, strict=True
    ):
        assert losses == expected_losses
        assert torch.equal(rows, expected_rows)


@pytest.mark.parametrize("rule", ['mode="async"', "staleness=2", "quorum=0.5"])
@pytest.mark.parametrize("options", [{}, {**HOT, "cache_steps": 2}], ids=["", "copies, caches"])
def test_rows_learn_under_relaxed_rules(
    world: World, monkeypatch: pytest.MonkeyPatch, rule: str, options: Any
) -> None:
    models = [Clicks(OPTIMIZERS["adagrad"], **options) for _ in range(2)]
    seen = torch.unique(data().tensors[0])
    seen = seen[seen != 3]
    with launched(monkeypatch, 2):
        found = world(2, lambda g: go(g, f"ps({rule}, servers=2)", models[g.rank]))
    some_or_all = any if "quorum" in rule else all  # one that is late leaves steps out
    hits = []
    for model, (_, rows, _) in zip(models, found, strict=True):
        assert torch.isfinite(rows).all() and torch.equal(rows, found[0][1])
        assert torch.equal(rows[3], torch.zeros(4)), "the padding stays 0"
        moved = (rows[seen] - model.rows.spec.initial(seen)).abs().amax(1) > 0
        assert some_or_all(moved.tolist()), "rows that occur have moved"
        table = model.rows.table
        assert isinstance(table, ServerTable) and (table.cache is not None) == bool(options)
        hits.append(table.cache is not None and table.cache.hits)
    assert some_or_all(hits) or not options


def test_rows_that_come_and_go_are_loaded_as_workers_saved_them_at_their_own_pace(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table has counted the updates of all workers, more than the one that saves has made."""
    options: Any = {"min_count": 2, "ttl_steps": 20}
    models = [Clicks(OPTIMIZERS["adam"], **options) for _ in range(3)]
    with launched(monkeypatch, 2):
        saved = tmp_path / "saved"
        world(2, lambda g: go(g, 'ps(mode="async", servers=2)', models[g.rank], save=saved))
    go(solo_group(), "single", models[2], load=saved)
    document = read_manifest(saved)
    (counted,) = document["models"][0]["tables"].values()
    assert counted == 10, "5 steps of each worker"


def test_a_table_that_is_loaded_has_no_copies_of_what_was_there(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second half of a run is repeated from its checkpoint, in the same job."""
    models = [Clicks(OPTIMIZERS["adagrad"], **HOT) for _ in range(2)]

    def twice(group: Group) -> Any:
        job = Job(parse("ps(servers=2)"), group, device=CPU, seed=3)
        model = models[group.rank]
        step = job.step(model, F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1))
        losses = [float(step(batch)) for batch in job.batches(data(), 11, steps=4)]
        job.save(tmp_path / "saved")
        after = []
        for _ in range(2):
            job.load(tmp_path / "saved")
            after.append([float(step(b)) for b in job.batches(data(), 11, epochs=3, steps=12)])
        job.close()
        return losses, after

    with launched(monkeypatch, 2):
        for _, (first, second) in world(2, twice):
            assert first == second and len(first) == 8
