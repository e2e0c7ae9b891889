"""The job: what a training function is given, on every rank."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput, CheckpointError, NotBuilt, ShoalError, StrategyError
from shoal.observe.time_shares import time_shares
from shoal.runtime.faults import Faults
from shoal.runtime.trace import Recorder
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.progress import ProgressLines
from shoal.train.step.run_services import RunServices
from tests.conftest import World
from tests.jobs import CPU, SGD, Shown, after_training, job_of
from tests.models import convnet, mlp, samples


def test_a_job_knows_its_place(world: World) -> None:
    def body(group: Group) -> tuple[int, ...]:
        job = job_of(group)
        return job.rank, job.size, job.replica, job.replicas

    assert world(3, body) == [(0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3)]


def test_what_has_no_runtime_or_no_sense_is_refused_at_once(world: World) -> None:
    with pytest.raises(NotBuilt, match="not built yet"):
        Job(parse('gossip(mode="async") + pp(2)'), solo_group(), device=CPU)
    with pytest.raises(StrategyError):
        world(2, lambda group: Job(parse("single"), group, device=CPU))


def reports(world: World, strategy: str) -> list[Any]:
    options: Any = {"data": samples(10), "batch_size": 5, "epochs": 2}
    return after_training(world, 2, strategy, lambda job, step, losses: job.report(), **options)


def test_a_report_counts_this_rank_s_own_steps_and_samples(world: World) -> None:
    found = reports(world, "ddp")
    assert [report["steps"] for report in found] == [4, 4]
    assert [report["samples"] for report in found] == [8, 12]  # 2 and 3 of every 5
    assert all(report["samples_per_s"] > 0 and report["steps_per_s"] > 0 for report in found)
    sent = {"steps": 4, "bytes_sent": 6400, "bytes_per_step": 1600, "ddp_bytes_per_step": 1600}
    assert found[0]["sync"] == [sent] and json.dumps(found)


@pytest.mark.parametrize("strategy", ["tp(2)", "pp(2)"])
def test_workers_of_one_replica_share_its_samples(world: World, strategy: str) -> None:
    for report in reports(world, strategy):
        assert report["samples_per_s"] == pytest.approx(2.5 * report["steps_per_s"])


def draws(group: Group, seed: int = 3, path: Path | None = None, load: bool = False) -> Any:
    """Numbers after each of four batches; saved after two of them, or continued."""
    job = job_of(group, seed)
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    if load:
        job.load(path)
    found = [] if load else [torch.rand(2, generator=job.generator).tolist()]
    for i, batch in enumerate(job.batches(samples(40), 10)):
        step(batch)
        found.append(torch.rand(2 + i % 2, generator=job.generator)[:2].tolist())
        if i == 1 and path is not None and not load:
            job.save(path)
    return found


def test_the_generator_differs_between_replicas_and_batches_and_continues(
    world: World, tmp_path: Path
) -> None:
    drawn = world(3, draws)
    numbers = [tuple(pair) for rank in drawn for pair in rank]
    assert len(set(numbers)) == len(numbers) == 15
    assert world(3, draws) == drawn
    alone = draws(solo_group(), path=tmp_path)
    assert draws(solo_group(), seed=4) != alone
    assert draws(solo_group(), path=tmp_path, load=True) == alone[3:]


def logged(progress: Any, batches: Callable[[Job], Any], models: int = 1) -> None:
    job = job_of(progress=progress)
    steps = []
    for _ in range(models):
        steps.append(job.step(mlp(), F.cross_entropy, optimizer=SGD))
    for batch in batches(job):
        losses = [step(batch) for step in steps]
        job.log(loss=losses[0], lr=0.1)
    job.close()


def records_of(batches: Callable[[Job], Any], models: int = 1) -> list[Any]:
    logged(shown := Shown(), batches, models)
    return list(shown.records)


def test_log_shows_the_step_the_total_and_numbers() -> None:
    records = records_of(lambda job: job.batches(samples(25), 10, epochs=2))
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert {r["total"] for r in records} == {6}
    assert all(type(v) is float for r in records for v in r["metrics"].values())
    assert records[0]["left_s"] is None
    assert records[-1]["left_s"] == 0.0
    assert records[-1]["samples_per_s"] > 0


def test_log_does_not_look_at_numbers_that_are_not_shown() -> None:
    class Untouchable:
        def __float__(self) -> float:
            raise AssertionError("waits for the device")

    value: Any = Untouchable()
    job_of(progress=Shown(due=False)).log(loss=value)


def test_the_total_of_a_continued_run_is_that_of_the_whole(tmp_path: Path) -> None:
    def batches(job: Job, total: int) -> Iterator[Any]:
        if total == 6:
            job.load(tmp_path)
        yield from job.batches(samples(20), 10, epochs=total // 2)
        job.save(tmp_path)

    for total in (4, 6):
        records = records_of(partial(batches, total=total))
        assert {record["total"] for record in records} == {total}
    assert [record["step"] for record in records] == [5, 6]


def test_a_script_with_two_models_is_never_past_its_end() -> None:
    records = records_of(lambda job: job.batches(samples(30), 10), models=2)
    assert all(r["step"] <= r["total"] for r in records)
    assert all(r["left_s"] is None or r["left_s"] >= 0 for r in records)


def test_the_last_step_is_shown_where_the_number_of_steps_is_not_known() -> None:
    out = io.StringIO()
    logged(ProgressLines(out), lambda job: job.batches(samples(10).tensors for _ in range(7)))
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1", "step 7"]
    assert "left" not in out.getvalue()


def test_a_loop_that_accumulates_counts_its_updates() -> None:
    out = io.StringIO()
    job = job_of(progress=ProgressLines(out))
    net = mlp()
    model, optimizer = job.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for number, (x, y) in enumerate(job.batches(samples(48), 4), 1):
        loss = F.cross_entropy(model(x), y)
        with nullcontext() if number % 4 == 0 else job.no_sync():
            job.backward(loss)
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        job.log(loss=loss)
    shown = [line.split("  ")[0] for line in out.getvalue().splitlines()]
    assert shown == ["step 1/3", "step 2/3", "step 3/3"]


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_checkpoint_named_as_a_file_is_said_to_be_a_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of()
    job.step(mlp(), F.cross_entropy, optimizer=SGD)
    job.save(tmp_path / name)
    assert f"{name} is a folder, which job.load reads" in capsys.readouterr().err


def test_log_and_print_show_on_rank_0_only(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [mlp() for _ in range(3)]
    out = io.StringIO()

    def body(group: Group) -> None:
        job = job_of(group, progress=ProgressLines(out) if group.rank == 0 else None)
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


def test_progress_counts_the_step_whose_update_is_done_and_takes_a_loss_with_its_graph() -> None:
    shown = Shown()
    job = job_of(progress=shown)
    model, optimizer = job.setup(mlp(), SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in job.batches(samples(12), 4):
            loss = F.cross_entropy(model(x), y)
            job.backward(loss)
            optimizer.step()
            job.log(loss=loss)
    job.close()
    assert [record["step"] for record in shown.records] == [1, 2, 3]


def test_a_loss_that_is_not_finite_is_reported_once_with_its_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = job_of(progress=Shown())
    losses = iter([1.0, 1.0, torch.nan, torch.inf])
    step = job.step(mlp(), lambda o, y: o.mean() * next(losses), optimizer=SGD, on_nan="go on")
    for batch in job.batches(samples(12), 3):
        job.log(loss=step(batch))
    job.close()
    assert capsys.readouterr().err.count("finite") == 1
    assert job._loss_watch.reported == 3


def test_steps_without_any_backward_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of()
    _, optimizer = job.setup(mlp(), SGD)
    optimizer.step()
    optimizer.step()
    job.close()
    assert capsys.readouterr().err.count("nothing is trained") == 1


def test_augmentation_may_replace_a_batch(world: World) -> None:
    def body(group: Group, model: nn.Module) -> list[float]:
        job = job_of(group)
        step = job.step(model, F.cross_entropy, optimizer=SGD, accumulate=2)
        return [step((x + 1, y)).item() for x, y in job.batches(samples(23), 10)]

    alone = body(solo_group(), mlp())
    models = [mlp() for _ in range(3)]
    for losses in world(3, lambda g: body(g, models[g.rank])):
        assert losses == pytest.approx(alone, abs=1e-5)


def test_a_step_refuses_what_is_no_batch_for_its_model() -> None:
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    x, y = samples(4).tensors
    bad: Any
    for bad, sentence in [
        ((), "no tensor with a dimension"),
        ((x, y[:3]), r"different numbers of samples: \[3, 4\]"),
        ((x.sum(), y.sum()), "no tensor with a dimension"),
        ({"x": x, "y": y}, "the forward of .* takes input: give the entries the names"),
        (object(), "no tensor with a dimension"),
    ]:
        with pytest.raises(BadInput, match=sentence):
            step(bad)
    step = job.step(mlp(), lambda outputs: outputs.mean(), optimizer=SGD)
    with pytest.raises(BadInput, match=r"takes \(outputs\).*loss\(outputs, targets\)"):
        step((x, y))


@pytest.mark.parametrize(
    ("strategy", "size", "mean"),
    [("ddp", 2, 3.5), ("cp(2)", 2, 3.0), ("ep(2)", 2, 3.0), ("ddp + cp(2)", 4, 3.5)],
)
def test_a_mean_is_over_all_samples_whatever_splits_them(
    world: World, strategy: str, size: int, mean: float
) -> None:
    def body(group: Group) -> float:
        job = Job(parse(strategy), group, device=CPU)
        return float(job.mean(3.0 + job.replica))

    assert world(size, body) == [mean] * size


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda job, step: next(job.batches(samples(8), "4")), "batch_size .* number, not '4'"),
        (lambda job, step: next(job.batches(samples(8), 4, epochs=2.5)), "epochs .* not 2.5"),
        (lambda job, step: job.log(loss={"a": 1.0}), r"job\.log\(\*\*it\).* not 'dict'"),
        (lambda job, step: job.log(loss=torch.ones(2)), "job.log shows numbers"),
        (lambda job, step: step.optimizer.param_groups, "lr=… or scheduler=…"),
    ],
)
def test_mistakes_of_scripts_have_a_sentence(use: Any, sentence: str) -> None:
    job = job_of(progress=Shown())
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    with pytest.raises(BadInput, match=sentence):
        use(job, step)


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
    wanted, parameters = body(solo_group(), mlp())
    for got, got_parameters in world(2, lambda g: body(g, models[g.rank])):
        torch.testing.assert_close(got_parameters, parameters)
        assert got == pytest.approx(wanted, abs=1e-6)


def test_every_rank_starts_from_rank_0(world: World) -> None:
    models = [mlp(seed=rank) for rank in range(3)]

    world(3, lambda g: job_of(g).step(models[g.rank], F.cross_entropy, optimizer=SGD))
    for model in models:
        for p, wanted in zip(model.parameters(), mlp(seed=0).parameters(), strict=True):
            assert torch.equal(p, wanted)


def test_a_trace_has_steps_batches_and_the_injected_sleep_as_spans_of_their_own() -> None:
    tracer = Recorder(0, 0)
    services = RunServices(tracer=tracer, faults=Faults(slow=3.0))
    job = Job(parse("single"), solo_group(), device=CPU, services=services)
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in job.batches(samples(24), 12):
        step(batch)
    job.evaluate(F.cross_entropy, samples(24), 12)
    job.close()
    steps = [span for span in tracer.spans if span.kind == "step"]
    slept = [span for span in tracer.spans if span.kind == "injected"]
    assert [span.detail for span in steps] == ["step 1", "step 2"]
    assert [span.track for span in tracer.spans if span.kind == "load"] == ["steps"] * 2
    for step_span, sleep_span in zip(steps, slept, strict=True):
        assert step_span.start_ns <= sleep_span.start_ns <= sleep_span.end_ns <= step_span.end_ns
    shares = time_shares(tracer.spans)
    assert shares.injected > 0
    assert shares.seconds < (tracer.spans[-1].end_ns - tracer.spans[0].start_ns) / 1e9


def test_a_later_job_of_a_process_may_end_first() -> None:
    first, later = job_of(), job_of()
    later.close()
    first.close()


PS = 'ps(placement="rank0")'


def nan_at(
    step: int, losses: list[float], where: Path, strategy: str, **options: Any
) -> Callable[[Group], Any]:
    """Trains seven steps and saves each; the inputs of one of them are nan."""

    models = [mlp(), mlp()]

    def body(group: Group) -> Any:
        job = Job(parse(strategy), group, device=CPU)
        train = job.step(models[group.rank], F.cross_entropy, optimizer=SGD, **options)
        x, y = samples(12).tensors
        try:
            for number in range(7):
                given = x * float("nan") if number + 1 == step else x
                losses.append(float(train((given, y))))
                job.save(where)
        finally:
            job.close()
        return job.steps, train.flat.data.isfinite().all().item()

    return body


@pytest.mark.parametrize("strategy", ["ddp", "zero(3)", "pp(2)", PS, f"{PS[:-1]}, quorum=0.5)"])
def test_a_run_stops_at_nan_and_keeps_the_checkpoint_before(
    world: World, tmp_path: Path, strategy: str
) -> None:
    losses: list[float] = []
    with pytest.raises(ShoalError, match=r"the loss of step 4 is not a finite number .* stops"):
        world(2, nan_at(4, losses, tmp_path, strategy))
    assert len(losses) == 2 * 3 and all(map(math.isfinite, losses))
    assert json.loads((tmp_path / "manifest.json").read_text())["steps"] == 3


@pytest.mark.parametrize(
    ("strategy", "on_nan", "is_finite"),
    [
        *((strategy, "skip", True) for strategy in ("ddp", "zero(3)", "pp(2)")),
        *((strategy, "go on", False) for strategy in ("ddp", "pp(2)", PS)),
    ],
)
def test_a_step_of_nan_is_skipped_on_all_ranks(
    world: World, tmp_path: Path, strategy: str, on_nan: str, is_finite: bool
) -> None:
    losses: list[float] = []
    body = nan_at(4, losses, tmp_path, strategy, on_nan=on_nan)
    assert world(2, body) == [(7, is_finite)] * 2
    assert sum(map(math.isnan, losses)) == 2 * (1 if is_finite else 4)


def test_weights_of_nan_do_not_replace_a_checkpoint(tmp_path: Path) -> None:
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    job.save(tmp_path)
    step.model.get_parameter("0.weight").data[0] = torch.nan
    with pytest.raises(CheckpointError, match="values that are nan: nothing was saved"):
        job.save(tmp_path)
