"""Workers, servers and hosts that are lost in virtual time, and come back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.cluster import Noise
from shoal.errors import BadInput, ShoalError
from shoal.plan.step.slow_workers import Unevenness
from shoal.rehearse.losses import Loss, Losses, read_losses
from shoal.rehearse.world import Rehearsed, Train
from shoal.train.job import Job
from tests.models import mlp, samples
from tests.rehearse.worlds import rehearsed

SGD = partial(torch.optim.SGD, lr=0.1)
DATA = samples(96)
STEPS = 12
AVERAGES = ["localsgd(every=2, elastic=True)", "gossip(elastic=True)"]
ELASTIC = ["ddp(elastic=True)", *(f"zero({stage}, elastic=True)" for stage in (1, 2, 3))]
IN_MEMORY = ["hogwild", 'gossip(mode="async")']
RELAXED = ['ps(mode="async")', "ps(quorum=0.75)", "ps(staleness=1)", "ps(quorum=3, servers=2)"]


def training(**options: Any) -> Train:
    """A training function that returns its weights; each worker evaluates them first."""

    def train(job: Job) -> torch.Tensor:
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD, **options)
        for batch in job.batches(DATA, batch_size=16, epochs=2):
            job.log(loss=step(batch))
        job.evaluate(F.cross_entropy, DATA, batch_size=16)
        return step.flat.data.clone()

    return train


def lossy(strategy: str, *kill: str, workers: int = 4, **options: Any) -> Rehearsed:
    """A rehearsal that loses workers at steps."""
    more = {name: options.pop(name) for name in ("restarts", "restart_s") if name in options}
    losses = options.pop("losses", Losses(kill, **more))
    return rehearsed(options.pop("train", training()), strategy, workers, losses=losses, **options)


def timeline(found: Rehearsed) -> Any:
    times = [(report["losses"], report["loss_s"]) for report in found.reports]
    return times, found.said, found.spans, found.link_bytes


def finished(found: Rehearsed) -> list[int]:
    return [report["rank"] for report in found.reports]


@pytest.mark.parametrize("strategy", RELAXED)
def test_the_others_go_on_and_the_end_says_who_is_missing(strategy: str) -> None:
    found = lossy(strategy, "1@4")
    assert finished(found) == [0, 2, 3]
    first, missed, last = found.said
    assert first.startswith("worker 1 was killed by SIGKILL after 0.0 s; the others go on, as ps(")
    assert missed == "worker 1 was lost at step 4; 9 steps were not trained"
    assert last == "finished by workers 0, 2 and 3, without worker 1"
    assert found.results[1] is None and torch.isfinite(found.results[0]).all()
    assert all(report["steps"] == STEPS for report in found.reports)


@pytest.mark.parametrize("strategy", [*RELAXED[:2], *ELASTIC[:2], *AVERAGES, *IN_MEMORY])
@pytest.mark.parametrize("kill", ["0@0", "1@1", "3@9"])
def test_a_worker_may_be_lost_at_any_step(strategy: str, kill: str) -> None:
    found = lossy(strategy, kill)
    assert finished(found) == [rank for rank in range(4) if rank != int(kill[0])]


@pytest.mark.parametrize("strategy", ELASTIC)
def test_elastic_workers_train_the_samples_of_lost_ones(strategy: str) -> None:
    (whole,) = rehearsed(training(), "single", 1).reports
    found = lossy(strategy, "2@3", "0@7")
    assert finished(found) == [1, 3]
    assert "worker 2 was lost at step 3; the others trained its samples" in found.said
    for report in found.reports:
        assert report["losses"] == pytest.approx(whole["losses"], rel=1e-4)
        assert report["evaluated"] == pytest.approx(whole["evaluated"], rel=1e-4)


@pytest.mark.parametrize("restarts", [0, 1])
def test_exact_sums_have_the_same_bits_whoever_is_lost(restarts: int) -> None:
    train = training(exact=True, microbatches=8)
    strategy = "ddp(elastic=True)"
    whole = lossy(strategy, train=train)
    found = lossy(strategy, "1@3", train=train, restarts=restarts, restart_s=0.02)
    for rank in finished(found):
        assert torch.equal(found.results[rank], whole.results[0])
    assert (1 in finished(found)) == bool(restarts)


@pytest.mark.parametrize("strategy", AVERAGES)
def test_averages_go_on_over_those_that_are_left(strategy: str) -> None:
    whole, found = lossy(strategy), lossy(strategy, "2@6")
    assert finished(found) == [0, 1, 3]
    before, after = (run.reports[0]["losses"][-1] for run in (whole, found))
    assert after == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("strategy", ['ps(mode="async")', "ps(quorum=3)", ELASTIC[0], ELASTIC[3]])
def test_a_worker_comes_back_after_its_restart(strategy: str) -> None:
    found = lossy(strategy, "1@3", restarts=1, restart_s=0.03)
    assert finished(found) == [0, 1, 2, 3]
    (said,) = (line for line in found.said if "came back" in line)
    assert said.startswith("worker 1 was lost at step 3 and came back after 0.0 s")
    assert found.reports[1]["steps"] == STEPS


def test_one_that_comes_too_late_is_told() -> None:
    found = lossy(ELASTIC[0], "1@3", restarts=1, restart_s=100.0)
    assert finished(found) == [0, 2, 3]
    assert any("came back too late, when the others had finished" in line for line in found.said)


@pytest.mark.parametrize("strategy", [*RELAXED[:2], ELASTIC[0], ELASTIC[3], *AVERAGES, *IN_MEMORY])
def test_the_same_losses_give_the_same_bits_and_seconds(strategy: str) -> None:
    uneven = Unevenness(Noise(jitter=0.2), seed=5, slow={3: 2.0})
    losses = Losses(("2@4",), (Loss(0.05, "worker", 0),), restarts=2, restart_s=0.02)
    runs = [lossy(strategy, losses=losses, uneven=uneven) for _ in range(2)]
    assert timeline(runs[0]) == timeline(runs[1])
    for one, other in zip(runs[0].results, runs[1].results, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_statistics_of_batchnorm_come_back_alike() -> None:
    def train(job: Job) -> torch.Tensor:
        model = nn.Sequential(nn.BatchNorm1d(6), mlp())
        step = job.step(model, F.cross_entropy, optimizer=SGD)
        for batch in job.batches(DATA, batch_size=16, epochs=2):
            job.log(loss=step(batch))
        return next(model.buffers()).clone()

    found = [lossy('ps(mode="async")', "1@3", train=train, restarts=1).results for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("strategy", "kill", "sentence"),
    [
        ("ddp", "1@3", "worker 1 was killed by SIGKILL"),
        ("ps", "1@3", "worker 1 was killed by SIGKILL"),
        ("zero(2)", "0@1", "worker 0 was killed by SIGKILL"),
        ("ps", "server:0@3", "server 0 was killed by SIGKILL while workers needed it"),
        ('ps(mode="async", servers=2)', "server:1@3", "server 1 was killed by SIGKILL while"),
    ],
)
def test_a_run_that_does_not_survive_a_loss_ends_with_one_sentence(
    strategy: str, kill: str, sentence: str
) -> None:
    with pytest.raises(ShoalError) as caught:
        lossy(strategy, kill)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


COPIED = ["ps(replicas=2)", 'ps(replicas=2, servers=2, mode="async")', "ps(replicas=3)"]


@pytest.mark.parametrize("strategy", COPIED)
@pytest.mark.parametrize("kill", ["server:0@4", "server:1@4"])
def test_copies_of_servers_go_on_and_one_that_was_lost_catches_up(strategy: str, kill: str) -> None:
    runs = [lossy(strategy, kill, restart_s=0.3) for _ in range(2)]
    assert timeline(runs[0]) == timeline(runs[1])
    found = runs[0]
    assert finished(found) == [0, 1, 2, 3]
    first, *others, last = found.said
    assert "was killed by SIGKILL after 0.0 s and is started again (1 of 3)" in first
    head = [line for line in others if line.endswith("is the head of shard 0 now")]
    assert len(head) == (kill == "server:0@4")
    assert last.startswith("servers lost: 1; ") and last.endswith(" s without service")


def test_an_exact_run_keeps_its_bits_when_servers_are_lost() -> None:
    train = training(exact=True, microbatches=4)
    whole = lossy(COPIED[0], train=train)
    found = lossy(COPIED[0], "server:0@3", "server:1@9", train=train, restart_s=0.01)
    for one, other in zip(found.results, whole.results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", ["ps(quorum=0.75)", "ps(quorum=0.75, replicas=2)"])
def test_servers_do_not_wait_for_the_connections_of_a_worker_that_has_exited(strategy: str) -> None:
    found = lossy(strategy, "1@4", workers=2)
    assert finished(found) == [0]
    assert found.seconds < 0.5  # virtual: a connection that is only broken has 3 s


def test_a_shard_is_lost_with_its_last_copy() -> None:
    with pytest.raises(ShoalError, match="all 2 replicas of shard 0 are lost, and its weights"):
        lossy(COPIED[0], "server:0@4", "server:1@4")


def test_when_all_are_lost_the_first_loss_is_reported() -> None:
    with pytest.raises(ShoalError, match="worker 1 was killed by SIGKILL"):
        lossy('ps(mode="async")', "1@3", "0@5", workers=2)


def test_a_moment_of_virtual_time_and_a_host() -> None:
    losses = Losses(at_moments=(Loss(0.05, "worker", 3), Loss(0.07, "host", 1)))
    found = lossy('ps(mode="async")', workers=12, losses=losses)
    assert finished(found) == [0, 1, 2, 4, 5, 6, 7]  # 8 devices a host
    assert found.said[0].startswith("worker 3 was killed by SIGKILL after 0.1 s")


def test_chance_takes_hosts_by_the_seed() -> None:
    def said(seed: int) -> list[str]:
        losses = Losses(mtbf_s=0.02, restarts=100, restart_s=0.005)
        return lossy(ELASTIC[0], workers=16, losses=losses, seed=seed).said

    assert said(4) == said(4) != said(3)


def test_what_is_named_has_to_be_there() -> None:
    for role, number in (("worker", 4), ("server", 0), ("host", 1)):
        with pytest.raises(BadInput, match=f"there is no {role} {number} to be lost"):
            lossy(ELASTIC[0], losses=Losses(at_moments=(Loss(1.0, role, number),)))


def reading(kill: list[str], events: Path | None = None, mtbf: str | None = None) -> Losses:
    return read_losses(kill, mtbf, events)


def test_options_are_read(tmp_path: Path) -> None:
    (tmp_path / "events.toml").write_text(
        '[[event]]\nat = "90s"\nwho = "2"\n[[event]]\nat = "1h"\nwhat = "kill"\nwho = "host:0"\n'
    )
    found = reading(["2@50", "server:1@5min"], tmp_path / "events.toml", "8h")
    assert found.at_steps == ("2@50",)
    moments = (Loss(300.0, "server", 1), Loss(90.0, "worker", 2), Loss(3600.0, "host", 0))
    assert found.at_moments == moments
    assert found.mtbf_s == 8 * 3600.0 and found.restart_s == 10.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[event]]\nat = "90s"\nwho = "two"\n', "not 'two@90s'"),
        ('[[event]]\nat = "90"\nwho = "2"\n', "not '2@90'"),
        ('[[event]]\nat = "90s"\nwho = "2"\nwhen = 3\n', "when"),
        ('[[event]]\nat = "90s"\nwho = "2"\nwhat = "pause"\n', "pause"),
        ('[[event]]\nat = "soon"\nwho = "2"\n', "not a time"),
        ("[[event]\n", "not TOML"),
        ('[[events]]\nat = "9s"\nwho = "2"\n', "events.toml: "),
        ("event = 3\n", "events.toml: "),
    ],
)
def test_files_of_events_are_checked(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "events.toml").write_text(text)
    with pytest.raises(BadInput, match=why):
        reading([], tmp_path / "events.toml")


def test_a_host_is_not_lost_at_a_step() -> None:
    with pytest.raises(BadInput, match="or host:0@5min"):
        reading(["host:1@20"])


def test_no_time_between_failures_is_refused() -> None:
    refused: Callable[[], Any] = partial(reading, [], None, "0s")
    with pytest.raises(BadInput, match="--mtbf"):
        refused()
