"""Checkpoints of several workers: all of them save and load the same, or none does."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.group import Group
from shoal.comm.members.elastic_sum import ElasticSum
from shoal.errors import CheckpointError, Desync
from shoal.train.agreement import Agreement
from shoal.train.checkpoints import files
from tests.checkpoints import file_of, save_some, start
from tests.comm.threads import on_shm_threads
from tests.conftest import World
from tests.models import mlp, samples


@pytest.mark.parametrize("strategy", ["ddp", "zero(3)", "pp(2)"])
def test_a_save_on_rank_0_only_is_named(tmp_path: Path, strategy: str) -> None:
    def body(group: Group) -> None:
        job, step = start(mlp(), group, strategy)
        for _ in range(2):
            for batch in job.batches(samples(32), 16):
                step(batch)
            if job.rank == 0:
                job.save(tmp_path / "c")

    with pytest.raises(Desync, match=r"also job\.save, where rank 0 writes"):
        on_shm_threads(2, body)
    assert not (tmp_path / "c").exists()


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

    def refusal(group: Group, name: str) -> str:
        job, _ = start(mlp(), group)
        with pytest.raises(CheckpointError) as caught:
            job.save(tmp_path / "file" / name)
        return str(caught.value)

    first, second = world(2, lambda group: refusal(group, "model"))
    assert first.startswith("cannot save a checkpoint at")
    assert second == f"{first} (rank 0)"
    first, second = world(2, lambda group: refusal(group, "ä" * 250))  # 500 bytes travel
    assert len(second) < len(first)
    assert first.startswith(second.removesuffix(" (rank 0)").rstrip("\ufffd"))


def test_ranks_that_are_lost_are_not_waited_for(world: World, tmp_path: Path) -> None:
    def body(group: Group) -> Any:
        if group.rank == 1:
            return None
        sums = ElasticSum(tmp_path / "sums", group.rank, {1}.__contains__, math.inf)
        return Agreement(group, sums).run(lambda: (None, f"x{group.rank}"))[1]

    assert world(3, body) == [{0: "x0", 2: "x2"}, None, {0: "x0", 2: "x2"}]
