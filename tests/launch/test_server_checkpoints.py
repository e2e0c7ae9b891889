"""--server-checkpoint: what the launcher refuses before the start, and what it says at the end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import BadInput, ShardLost
from shoal.launch.here.checkpoint_option import saying_latest, with_server_checkpoint
from shoal.runtime.checkpoint_folders import WORKER_FILE, shard_name, version_of
from shoal.runtime.config import RunConfig
from shoal.strategy.strategy import parse

NAMES = (shard_name(0, 1), WORKER_FILE)


def save(folder: Path, number: int, names: tuple[str, ...] = NAMES) -> None:
    version = version_of(folder, number, 7)
    version.path.mkdir(parents=True)
    for name in names:
        (version.path / name).touch()


def read(text: str, strategy: str = "ps") -> tuple[Path | None, int]:
    config = with_server_checkpoint(RunConfig(), parse(strategy), text, False)
    return config.server_checkpoint.folder, config.server_checkpoint.every


def test_the_folder_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    assert read(f"{tmp_path}/a/b:every=5") == (tmp_path / "a" / "b", 5)
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert read(f"{tmp_path}/10:30=x") == (tmp_path / "10:30=x", 100)


@pytest.mark.parametrize(
    "end", [":evry=5", ":every=0", ":every=-5", ":every=", ":every=5x", ":s=1"]
)
def test_an_option_other_than_every_is_refused(tmp_path: Path, end: str) -> None:
    with pytest.raises(BadInput, match="takes DIR or DIR:every=STEPS, not "):
        read(f"{tmp_path}/a{end}")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"cannot write to .*/file/c: not a directory$"):
        read(f"{tmp_path}/file/c")
    with pytest.raises(BadInput, match="cannot write to /proc/x: no such file or directory"):
        read("/proc/x")


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("ddp", "--server-checkpoint is for ps, and this run has -s ddp"),
        ('ps(update="worker")', "workers hold the weights: use job.save"),
        ("ps + tp(2)", "splits each of them over 2 workers: use job.save"),
    ],
)
def test_strategies_whose_servers_cannot_save_are_refused_before_the_start(
    tmp_path: Path, strategy: str, why: str
) -> None:
    with pytest.raises(BadInput, match=why):
        read(f"{tmp_path}/a", strategy)
    assert list(tmp_path.iterdir()) == []


def test_the_end_says_which_checkpoint_is_the_latest_and_removes_a_half_written_one(
    tmp_path: Path,
) -> None:
    said: list[str] = []

    def end(error: type[Exception] | None = None, *args: Any) -> list[str]:
        """What a run says that ends so."""
        said.clear()
        with suppress(error or ()), saying_latest(tmp_path, said.append):
            if error is not None:
                raise error(*args)
        return said

    latest = f"the latest checkpoint in {tmp_path} is of step 10"
    assert end() == [f"there is no checkpoint in {tmp_path}"]
    assert end(KeyError) == []  # before the first checkpoint
    save(tmp_path, 10)
    save(tmp_path, 60, NAMES[1:])
    assert end(BadInput, "DIR has the checkpoint of another run") == []
    assert len(list(tmp_path.iterdir())) == 2
    assert end(ShardLost, 0, "all 2 replicas of shard 0 are lost") == []  # which names it itself
    assert [path.name for path in tmp_path.iterdir()] == [version_of(tmp_path, 10, 7).path.name]
    assert end() == [latest]
    assert end(KeyError) == [f"{latest}: --resume goes on from it"]
    with pytest.raises(KeyError), saying_latest(None, said.append):
        raise KeyError


def test_a_used_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(BadInput, match="has the checkpoint of another run after 10 steps: go on"):
        with_server_checkpoint(RunConfig(), parse("ps"), str(tmp_path), False)
    config = with_server_checkpoint(RunConfig(), parse("ps"), str(tmp_path), True)
    assert config.server_checkpoint.resume
