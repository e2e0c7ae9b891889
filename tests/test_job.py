"""The job: what a training function is given, on every rank."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shoal.errors import BadInput, NotBuilt, ShoalError, StrategyError
from shoal.faults import Faults
from shoal.group.group import Group
from shoal.group.solo import SoloGroup
from shoal.group.survivors import Tally
from shoal.job import Job
from shoal.observe.progress import Lines
from shoal.strategy import parse
from tests.conftest import World
from tests.models import convnet, mlp, samples

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.1)


def job_of(group: Group | None = None, seed: int = 3, **options: Any) -> Job:
    return Job(parse("ddp"), group or SoloGroup(), device=CPU, seed=seed, **options)


def accuracy(out: Tensor, y: Tensor) -> Tensor:
    return (out.argmax(1) == y).float().mean()


def loss_and_accuracy(out: Tensor, y: Tensor) -> dict[str, Any]:
    return {"loss": F.cross_entropy(out, y), "accuracy": accuracy(out, y).item()}


# -------------------------------------------------------------------------- place


def test_a_job_knows_its_place(world: World) -> None:
    def body(group: Group) -> tuple[int, ...]:
        job = job_of(group)
        return job.rank, job.size, job.replica, job.replicas

    assert world(3, body) == [(0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3)]


def test_what_has_no_runtime_or_no_sense_is_refused_at_once(world: World) -> None:
    with pytest.raises(NotBuilt, match="not built yet"):
        Job(parse('ps(mode="async") + pp(2)'), SoloGroup(), device=CPU)
    with pytest.raises(StrategyError):
        world(2, lambda group: Job(parse("single"), group, device=CPU))


# -------------------------------------------------------------------------- evaluate


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [None, 1, 5, 100])
def test_evaluate_is_the_metric_of_the_whole_dataset(
    world: World, size: int, batch_size: int | None
) -> None:
    """23 samples: parts are uneven, and some are empty."""
    data = samples(23)
    models = [mlp() for _ in range(size)]

    def body(group: Group) -> dict[str, float]:
        job = job_of(group)
        job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        found: dict[str, float] = job.evaluate(loss_and_accuracy, data, batch_size)
        return found

    with torch.no_grad():
        wanted = loss_and_accuracy(mlp()(data.tensors[0]), data.tensors[1])
    for found in world(size, body):
        assert found == pytest.approx({k: float(v) for k, v in wanted.items()}, abs=1e-6)


@pytest.mark.parametrize(("lost", "batch_size"), [((), 5), ((1,), 5), ((2, 1), 4), ((2,), 2)])
def test_evaluate_covers_all_samples_when_ranks_are_lost(
    world: World, tmp_path: Path, lost: tuple[int, ...], batch_size: int
) -> None:
    """A batch size of 2 leaves one of three ranks without a sample."""
    data, models = samples(23), [mlp() for _ in range(4)]  # threads share the seed of torch
    alone = job_of()
    alone.step(models[3], F.cross_entropy, optimizer=SGD)
    expected = alone.evaluate(loss_and_accuracy, data, batch_size)

    def body(group: Group) -> Any:
        job = job_of(group, tally=Tally(tmp_path, group.rank, lambda rank: rank in lost))
        job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        if group.rank in lost:
            return None
        return [job.evaluate(loss_and_accuracy, data, batch_size) for _ in range(2)]

    found = [result for result in world(3, body) if result is not None]
    assert len(found) == 3 - len(lost)
    assert all(result == found[0] for result in found)
    for result in found[0]:
        assert result == pytest.approx(expected, rel=1e-6)


def test_a_report_counts_this_rank_s_own_steps_and_samples(world: World) -> None:
    def body(group: Group) -> dict[str, Any]:
        job = job_of(group)
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        for batch in job.batches(samples(10), batch_size=5, epochs=2):
            step(batch)
        job.close()
        return job.report()

    reports = world(2, body)
    assert [report["steps"] for report in reports] == [4, 4]
    assert [report["samples"] for report in reports] == [8, 12]  # 2 and 3 of every 5
    assert all(report["samples_per_s"] > 0 and report["steps_per_s"] > 0 for report in reports)
    sent = {"steps": 4, "bytes_sent": 6400, "bytes_per_step": 1600, "ddp_bytes_per_step": 1600}
    assert reports[0]["sync"] == [sent] and json.dumps(reports)


def test_faults_surround_the_computing_of_a_step() -> None:
    moments: list[str] = []

    class Noted(Faults):
        def around(self, run: Any, number: Any, clock_s: Any) -> Any:
            def troubled(*args: Any) -> Any:
                moments.append(f"before {number()}")
                result = run(*args)
                moments.append("after")
                return result

            return troubled

    job = job_of(faults=Noted())
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in job.batches(samples(10), batch_size=5):
        step(batch)
    assert moments == ["before 1", "after", "before 2", "after"]


def test_evaluate_gives_a_number_for_a_number() -> None:
    job = job_of()
    job.step(mlp(), F.cross_entropy, optimizer=SGD)
    assert isinstance(job.evaluate(accuracy, samples(20)), float)
    assert job.evaluate(lambda out, y: 2, samples(20)) == 2.0


def test_evaluate_takes_any_dataset_with_len_and_indexing() -> None:
    job, data = job_of(), samples(23)
    job.step(mlp(), F.cross_entropy, optimizer=SGD)
    plain = [data[i] for i in range(23)]
    assert job.evaluate(accuracy, plain) == pytest.approx(job.evaluate(accuracy, data))


def test_evaluate_switches_training_off_and_on_again() -> None:
    job, seen = job_of(), []
    model = nn.Sequential(nn.Dropout(0.9), mlp())
    job.step(model, F.cross_entropy, optimizer=SGD)

    def metric(out: Tensor, y: Tensor) -> float:
        seen.append((model.training, torch.is_grad_enabled()))
        return 0.0

    job.evaluate(metric, samples(4))
    assert seen == [(False, False)]
    assert model.training
    model.eval()
    job.evaluate(metric, samples(4))
    assert not model.training


def test_evaluate_switches_training_on_again_after_an_error() -> None:
    job, model = job_of(), mlp()
    job.step(model, F.cross_entropy, optimizer=SGD)
    with pytest.raises(ZeroDivisionError):
        job.evaluate(lambda out, y: 1 / 0, samples(4))
    assert model.training


def test_evaluate_uses_the_latest_model_or_the_one_it_is_given() -> None:
    job = job_of()
    first = job.step(nn.Linear(6, 1), F.mse_loss, optimizer=SGD)
    job.step(nn.Linear(6, 2), F.mse_loss, optimizer=SGD)

    def width(out: Tensor, y: Tensor) -> int:
        return out.shape[1]

    assert job.evaluate(width, samples(4)) == 2.0
    assert job.evaluate(width, samples(4), step=first) == 1.0


def test_evaluate_needs_a_model_and_samples() -> None:
    job = job_of()
    with pytest.raises(ShoalError, match=r"job\.evaluate comes after job\.step"):
        job.evaluate(accuracy, samples(4))
    job.step(mlp(), F.cross_entropy, optimizer=SGD)
    with pytest.raises(BadInput, match="no samples"):
        job.evaluate(accuracy, [])


def test_evaluate_does_not_disturb_the_place_in_the_data() -> None:
    data = samples(40)

    def losses(evaluating: bool) -> list[float]:
        job = job_of()
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        found = []
        for batch in job.batches(data, 10, epochs=2):
            found.append(step(batch).item())
            if evaluating:
                job.evaluate(accuracy, samples(7))
        return found

    assert losses(True) == losses(False)


def test_a_metric_per_sample_is_refused() -> None:
    job = Job(parse("single"), SoloGroup(), device=torch.device("cpu"))
    job.step(mlp(), F.cross_entropy, optimizer=SGD)
    with pytest.raises(BadInput, match="has to be one number"):
        job.evaluate(lambda outputs, targets: outputs.argmax(1) == targets, samples(10))


def test_evaluate_with_statistics_of_the_batch_equals_one_device(world: World) -> None:
    """BatchNorm without running statistics, after a training batch that left a rank empty."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        return nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3))

    def body(group: Group, model: nn.Module) -> float:
        job = job_of(group)
        step = job.step(model, F.cross_entropy, optimizer=SGD)
        for batch in job.batches(samples(12), 10):
            step(batch)
        found: float = job.evaluate(lambda out, y: F.cross_entropy(out, y), samples(12), 10)
        return found

    alone = body(SoloGroup(), make())
    models = [make() for _ in range(3)]
    for found in world(3, lambda g: body(g, models[g.rank])):
        assert found == pytest.approx(alone, abs=1e-5)


# -------------------------------------------------------------------------- randomness


def draws(group: Group, seed: int = 3, epochs: int = 1) -> list[list[float]]:
    job = job_of(group, seed)
    found = [torch.rand(2, generator=job.generator).tolist()]
    for i, _ in enumerate(job.batches(samples(30), 10, epochs=epochs)):
        found.append(torch.rand(2 + i % 2, generator=job.generator)[:2].tolist())
    return found


def test_the_generator_differs_between_replicas_and_batches(world: World) -> None:
    numbers = [tuple(pair) for rank in world(3, draws) for pair in rank]
    assert len(set(numbers)) == len(numbers) == 12


def test_the_generator_is_reproducible(world: World) -> None:
    assert world(3, draws) == world(3, draws)
    assert draws(SoloGroup(), seed=4) != draws(SoloGroup(), seed=3)


def test_the_generator_continues_after_a_checkpoint(tmp_path: Path) -> None:
    data, found = samples(40), []
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in job.batches(data, 10):
        step(batch)
        found.append(torch.rand(1, generator=job.generator).item())
        if job.steps == 2:
            job.save(tmp_path)
    again = job_of()
    again.step(mlp(), F.cross_entropy, optimizer=SGD)
    again.load(tmp_path)
    resumed = [torch.rand(1, generator=again.generator).item() for _ in again.batches(data, 10)]
    assert resumed == found[2:]


# -------------------------------------------------------------------------- progress


class Shown:
    """A progress that keeps what it is given."""

    def __init__(self, due: bool = True):
        self.is_due, self.records = due, list[Mapping[str, Any]]()

    def due(self, step: int, total: int | None) -> bool:
        return self.is_due

    def show(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        return None


def test_log_shows_the_step_the_total_and_numbers() -> None:
    shown = Shown()
    job = job_of(progress=shown)
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in job.batches(samples(25), 10, epochs=2):
        job.log(loss=step(batch), lr=0.1)
    assert [r["step"] for r in shown.records] == [1, 2, 3, 4, 5, 6]
    assert {r["total"] for r in shown.records} == {6}
    assert all(type(v) is float for r in shown.records for v in r["metrics"].values())
    assert shown.records[0]["left_s"] is None
    assert shown.records[-1]["left_s"] == 0.0
    assert shown.records[-1]["samples_per_s"] > 0


def test_log_does_not_look_at_numbers_that_are_not_shown() -> None:
    class Untouchable:
        def __float__(self) -> float:
            raise AssertionError("waits for the device")

    value: Any = Untouchable()
    job_of(progress=Shown(due=False)).log(loss=value)


def test_the_total_of_a_continued_run_is_that_of_the_whole(tmp_path: Path) -> None:
    for total in (4, 6):
        shown = Shown()
        job = job_of(progress=shown)
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        if total == 6:
            job.load(tmp_path)
        for batch in job.batches(samples(20), 10, epochs=total // 2):
            job.log(loss=step(batch))
        job.save(tmp_path)
        assert {r["total"] for r in shown.records} == {total}
    assert [r["step"] for r in shown.records] == [5, 6]


def test_a_script_with_two_models_is_never_past_its_end() -> None:
    shown = Shown()
    job = job_of(progress=shown)
    steps = [job.step(mlp(), F.cross_entropy, optimizer=SGD) for _ in range(2)]
    for batch in job.batches(samples(30), 10):
        losses = [step(batch) for step in steps]
        job.log(loss=losses[0])
    assert all(r["step"] <= r["total"] for r in shown.records)
    assert all(r["left_s"] is None or r["left_s"] >= 0 for r in shown.records)


def test_an_iterable_without_a_length_has_no_total() -> None:
    shown = Shown()
    job = job_of(progress=shown)
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in job.batches(b for b in [samples(10).tensors] * 2):
        job.log(loss=step(batch))
    assert [r["total"] for r in shown.records] == [None, None]
    assert shown.records[-1]["left_s"] is None


def test_log_and_print_show_on_rank_0_only(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [mlp() for _ in range(3)]
    out = io.StringIO()

    def body(group: Group) -> None:
        job = job_of(group, progress=Lines(out) if group.rank == 0 else None)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        for batch in job.batches(samples(20), 10):
            job.log(loss=step(batch))
        job.print("done", group.rank)

    world(3, body)
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1/2", "step 2/2"]
    assert capsys.readouterr().out == "done 0\n"


def test_a_message_is_said_once_and_by_rank_0(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [[convnet(), convnet()] for _ in range(2)]

    def body(group: Group) -> None:
        job = job_of(group)
        for model in models[group.rank]:
            job.step(model, F.cross_entropy, optimizer=SGD, accumulate=2)

    world(2, body)
    err = capsys.readouterr().err
    assert err.count("BatchNorm statistics are those of each micro-batch") == 1
    assert err.startswith("shoal: ") and err.count("\n") == 1


# -------------------------------------------------------------------------- batches


def test_an_iterable_that_differs_between_ranks_is_refused(world: World) -> None:
    def body(group: Group) -> None:
        x, y = samples(10, seed=group.rank).tensors
        next(job_of(group).batches([(x, y)]))

    with pytest.raises(BadInput, match="different global batches from the same iterable"):
        world(2, body)


def test_a_batch_whose_samples_are_in_another_order_is_refused(world: World) -> None:
    """Replicas would take the same sample twice and leave others out."""
    x = torch.arange(8.0).view(8, 1)

    def body(group: Group) -> None:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(group.rank))
        next(job_of(group).batches([(x[order], x[order])]))

    with pytest.raises(BadInput, match="different global batches from the same iterable"):
        world(2, body)


def test_an_iterable_of_another_batch_size_is_refused(world: World) -> None:
    def body(group: Group) -> None:
        x = torch.zeros(8 + group.rank, 1)
        next(job_of(group).batches([(x, x)]))

    with pytest.raises(BadInput, match="different global batches from the same iterable"):
        world(2, body)


def test_the_same_iterable_on_every_rank_is_fine(world: World) -> None:
    data = samples(22)

    def body(group: Group) -> list[list[float]]:
        loader = DataLoader(
            data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5)
        )
        return [x[:, 0].tolist() for x, _ in job_of(group).batches(loader)]

    first, second = world(2, body)
    together = [value for part in (*first, *second) for value in part]
    assert sorted(together) == sorted(data.tensors[0][:, 0].tolist())


def test_missing_numbers_do_not_make_batches_differ(world: World) -> None:
    x = torch.full((4, 1), float("nan"))
    assert world(2, lambda g: len(list(job_of(g).batches([(x, x)])))) == [1, 1]


def test_a_batch_that_is_smaller_than_the_world_is_refused(world: World) -> None:
    with pytest.raises(BadInput, match="a batch of 2 samples cannot be shared by 3 replicas"):
        world(3, lambda g: job_of(g).batches(samples(10), 2))
    with pytest.raises(BadInput, match="a batch of 2 samples cannot be shared by 3 replicas"):
        world(3, lambda g: next(job_of(g).batches([samples(2).tensors])))


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_of_nothing_is_refused(batch_size: int) -> None:
    with pytest.raises(BadInput, match="cannot be shared"):
        job_of().batches(samples(10), batch_size)


def test_what_is_no_data_is_refused_before_the_first_batch() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    data: Any
    for data, options, sentence in [
        (5, {}, "int is neither"),
        (Endless(), {"batch_size": 4}, "Endless is none"),
        (iter([]), {"epochs": 2}, "cannot repeat a generator"),
        (samples(0), {"batch_size": 4}, "nothing to train on"),
        (samples(8), {"batch_size": 4, "epochs": 0}, "nothing to train on"),
    ]:
        with pytest.raises(BadInput, match=sentence):
            job_of().batches(data, **options)


def test_every_epoch_has_its_own_order() -> None:
    data = TensorDataset(torch.arange(20), torch.arange(20))
    orders = [x.tolist() for x, _ in job_of().batches(data, 20, epochs=3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    still = [x.tolist() for x, _ in job_of().batches(data, 20, epochs=2, shuffle=False)]
    assert still == [list(range(20))] * 2


def test_a_loop_over_epochs_of_ones_own_visits_the_same_orders() -> None:
    data = TensorDataset(torch.arange(20), torch.arange(20))
    inside = [x.tolist() for x, _ in job_of().batches(data, 8, epochs=3)]
    job = job_of()
    outside = [x.tolist() for _ in range(3) for x, _ in job.batches(data, 8)]
    assert outside == inside


@pytest.mark.parametrize("stop", [1, 3, 4, 8, 9])
def test_a_loop_over_epochs_of_ones_own_continues_where_it_was(tmp_path: Path, stop: int) -> None:
    data = samples(25)

    def losses(save_at: int | None) -> list[float]:
        job = job_of()
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        if save_at is None:
            job.load(tmp_path)
        found = []
        for _ in range(3):
            for batch in job.batches(data, 10):
                found.append(step(batch).item())
                if job.steps == save_at:
                    job.save(tmp_path)
        return found

    whole = losses(stop)
    assert len(whole) == 9
    assert losses(None) == whole[stop:]


def test_batches_end_after_a_number_of_steps() -> None:
    fetched: list[int] = []

    class Watched(TensorDataset):
        def __getitem__(self, i: int) -> Any:
            fetched.append(i)
            return super().__getitem__(i)

    shown = Shown()
    job = job_of(progress=shown)
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in job.batches(Watched(*samples(25).tensors), 10, epochs=4, steps=5):
        job.log(loss=step(batch))
    assert job.steps == 5
    assert {r["total"] for r in shown.records} == {5}
    assert len(fetched) == 25 + 20, "an epoch, and two batches of the next one"


def test_an_endless_iterable_ends_after_a_number_of_steps() -> None:
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    source = itertools.repeat(samples(10).tensors)
    for batch in job.batches(source, steps=3):
        step(batch)
    assert job.steps == 3


def test_more_steps_than_there_are_batches_are_not_expected() -> None:
    shown = Shown()
    job = job_of(progress=shown)
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in job.batches(samples(25), 10, steps=100):
        job.log(loss=step(batch))
    assert job.steps == 3
    assert {r["total"] for r in shown.records} == {3}


@pytest.mark.parametrize("first", [2, 3, 5])
def test_a_run_of_some_steps_continues_to_a_later_one(tmp_path: Path, first: int) -> None:
    def losses(load: bool, steps: int) -> list[float]:
        job = job_of()
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        if load:
            job.load(tmp_path)
        found = [
            step(batch).item() for batch in job.batches(samples(25), 10, epochs=9, steps=steps)
        ]
        job.save(tmp_path)
        return found

    whole = losses(False, 8)
    assert losses(False, first) == whole[:first]
    assert losses(True, 8) == whole[first:]


def test_augmentation_may_replace_a_batch(world: World) -> None:
    def body(group: Group, model: nn.Module) -> list[float]:
        job = job_of(group)
        step = job.step(model, F.cross_entropy, optimizer=SGD, accumulate=2)
        return [step((x + 1, y)).item() for x, y in job.batches(samples(23), 10)]

    alone = body(SoloGroup(), mlp())
    models = [mlp() for _ in range(3)]
    for losses in world(3, lambda g: body(g, models[g.rank])):
        assert losses == pytest.approx(alone, abs=1e-5)


def test_a_step_takes_a_pair() -> None:
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    x, y = samples(4).tensors
    bad: Any
    for bad in (x, (x,), (x, y, y), {"x": x, "y": y}):
        with pytest.raises(BadInput, match="pair"):
            step(bad)


def mean_by_hand(out: Tensor, y: Tensor) -> Tensor:
    """As scripts write it; the gradient of 0/0 is no number either."""
    counted = (y >= 0).float()
    return (F.cross_entropy(out, y.clamp(min=0), reduction="none") * counted).sum() / counted.sum()


@pytest.mark.parametrize("loss", [F.cross_entropy, mean_by_hand])
def test_a_part_that_counts_for_nothing_has_no_weight(world: World, loss: Any) -> None:
    """One rank's half of the batch is all padding: the mean over its tokens is 0/0."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, -100, -100])

    def body(group: Group, model: nn.Module) -> tuple[float, Tensor]:
        job = job_of(group)
        step = job.step(model, loss, optimizer=SGD, count=lambda batch: (batch[1] >= 0).sum())
        (batch,) = job.batches([(x, y)])
        return step(batch).item(), torch.cat([p.detach().flatten() for p in model.parameters()])

    models = [mlp() for _ in range(2)]
    wanted, parameters = body(SoloGroup(), mlp())
    for got, got_parameters in world(2, lambda g: body(g, models[g.rank])):
        torch.testing.assert_close(got_parameters, parameters)
        assert got == pytest.approx(wanted, abs=1e-6)


def test_every_rank_starts_from_rank_0(world: World) -> None:
    models = [mlp(seed=rank) for rank in range(3)]

    world(3, lambda g: job_of(g).step(models[g.rank], F.cross_entropy, optimizer=SGD))
    for model in models:
        for p, wanted in zip(model.parameters(), mlp(seed=0).parameters(), strict=True):
            assert torch.equal(p, wanted)


def test_hooks_see_every_step() -> None:
    job, seen = job_of(), []
    job.on_build.append(lambda step: seen.append("built"))
    job.on_step.append(lambda step, loss: seen.append(step.steps))
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in job.batches(samples(20), 10):
        step(batch)
    assert seen == ["built", 1, 2]
