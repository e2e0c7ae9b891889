"""Checkpoints of several workers: all of them save and load the same, or none does."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.group import Group
from shoal.comm.members.elastic_sum import ElasticSum
from shoal.errors import CheckpointError
from shoal.train.agreement import Agreement
from shoal.train.checkpoints import files
from tests.checkpoints import CPU, file_of, save_some, start
from tests.conftest import World
from tests.models import mlp, samples


@pytest.mark.parametrize("strategy", ["ddp", "zero(1)", "gossip", "localsgd(every=2)"])
def test_all_workers_load_what_was_saved_right_before(
    world: World, tmp_path: Path, strategy: str
) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        job, step = start(mlp(), group, strategy)
        found = []
        for batch in job.batches(samples(160), 16):
            step(batch)
            job.save(tmp_path)
            saved = job.steps
            job.load(tmp_path)
            assert job.steps == saved, f"rank {job.rank} loaded an old checkpoint"
            found.append(step.flat.data.clone())
        return found

    first, *others = world(4, body)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def refusals(world: World, paths: list[Path]) -> list[str]:
    """What each rank says that refuses to load its path; nothing of it is loaded."""

    def body(group: Group) -> str:
        job, step = start(mlp(), group)
        before = step.flat.data.clone()
        with pytest.raises(CheckpointError) as caught:
            job.load(paths[group.rank])
        assert torch.equal(step.flat.data, before)
        assert job.steps == 0
        return str(caught.value)

    return world(len(paths), body)


def test_workers_that_read_different_checkpoints_are_named(world: World, tmp_path: Path) -> None:
    save_some(tmp_path / "new", steps=3)
    save_some(tmp_path / "old", steps=2)
    digests = {name: files.read_manifest(tmp_path / name)["sha256"][:12] for name in ("new", "old")}

    for sentence in refusals(world, [tmp_path / name for name in ("new", "old", "new")]):
        assert "different checkpoints" in sentence
        assert f"rank 0 {digests['new']}, rank 1 {digests['old']}, rank 2" in sentence


def test_if_one_worker_cannot_read_none_loads(world: World, tmp_path: Path) -> None:
    save_some(tmp_path / "whole", steps=3)
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    file = file_of(tmp_path / "broken", "model")
    file.write_bytes(file.read_bytes()[:-1])

    paths = [tmp_path / name for name in ("whole", "whole", "broken")]
    for rank, sentence in enumerate(refusals(world, paths)):
        assert f"{file.name} has changed" in sentence
        assert sentence.endswith("(rank 2)") == (rank != 2)


def test_if_the_checkpoint_cannot_be_written_all_workers_say_so(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")

    def body(group: Group) -> str:
        job, _ = start(mlp(), group)
        with pytest.raises(CheckpointError) as caught:
            job.save(tmp_path / "file" / "model")
        return str(caught.value)

    first, second = world(2, body)
    assert first.startswith("cannot save a checkpoint at")
    assert second == f"{first} (rank 0)"


def exchange(group: Group, folder: Path | None, lost: set[int]) -> Any:
    """Every rank says its own text; those that are lost say nothing."""
    if group.rank in lost:
        return None
    sums = None if folder is None else ElasticSum(folder, group.rank, lost.__contains__, math.inf)
    agreement = Agreement(group, CPU, sums)
    results = [agreement.run(partial(said, group.rank, text)) for text in ("ä" * 250, "", "x")]
    assert [result for result, _ in results] == [group.rank] * 3
    return [texts for _, texts in results]


def said(rank: int, text: str) -> tuple[int, str]:
    return rank, f"{rank}{text}"


@pytest.mark.parametrize(
    ("elastic", "lost"), [(False, set()), (True, set()), (True, {1})], ids=["all", "sums", "lost"]
)
def test_texts_of_all_ranks_that_are_left_arrive(
    world: World, tmp_path: Path, elastic: bool, lost: set[int]
) -> None:
    folder = tmp_path / "sums" if elastic else None
    ranks = {0, 1, 2} - lost
    for rank, texts in enumerate(world(3, lambda group: exchange(group, folder, lost))):
        if rank in ranks:
            assert texts[1:] == [{r: f"{r}{text}" for r in ranks} for text in ("", "x")]
            assert all(t.startswith(f"{r}" + "ä" * 249) for r, t in texts[0].items())
