"""The folder of server checkpoints: a complete one stays complete, whatever dies or fails."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from shoal.errors import CheckpointError
from shoal.runtime.checkpoint_folders import (
    WORKER_FILE,
    ServerVersion,
    complete_versions,
    shard_name,
    version_of,
    versions_in,
)
from shoal.server.process.shard_file import PartWriter, read_tensors_of, write_tensors
from tests.failpoints import arm, doing

NAMES = (shard_name(0, 2), shard_name(1, 2), WORKER_FILE)


def save(folder: Path, number: int, names: tuple[str, ...] = NAMES) -> ServerVersion:
    version = version_of(folder, number, 7)
    for name in names:
        version.write(name, lambda file: file.write_bytes(b"%d" % number) and None)
    return version


def numbers(folder: Path) -> list[int]:
    return [version.number for version in complete_versions(folder)]


@pytest.mark.parametrize("point", ["begin", "temporary", "fsync", "rename"])
@pytest.mark.parametrize("passage", [4, 5, 6])
def test_a_kill_at_any_point_leaves_the_checkpoint_before(
    tmp_path: Path, point: str, passage: int
) -> None:
    pid = os.fork()
    if pid == 0:
        arm(f"snapshot.{point}:kill@{passage}")
        save(tmp_path, 100)
        save(tmp_path, 200)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    is_last = point == "rename" and passage == 6
    assert numbers(tmp_path) == ([200, 100] if is_last else [100])
    save(tmp_path, 300)
    assert numbers(tmp_path) == ([300, 200] if is_last else [300, 100])
    assert not [file for file in tmp_path.rglob("writing-*")]


@pytest.mark.parametrize(
    ("saved", "left", "complete"),
    [
        ([(400, NAMES[:2]), (500, NAMES[1:])], [500, 300, 200], [300, 200]),
        ([(400, NAMES[2:])], [400, 300, 200], [300, 200]),  # before the servers have written
        ([(400, NAMES[2:]), (400, NAMES[:1]), (400, NAMES[1:2])], [400, 300], [400, 300]),
        ([(500, NAMES[:1]), (400, NAMES)], [500, 400, 300], [400, 300]),  # others write the later
    ],
)
def test_two_complete_checkpoints_stay_and_what_others_write(
    tmp_path: Path, saved: list[tuple[int, tuple[str, ...]]], left: list[int], complete: list[int]
) -> None:
    for number, names in [(100, NAMES), (200, NAMES), (300, NAMES), *saved]:
        save(tmp_path, number, names)
    assert [version.number for version in versions_in(tmp_path)] == left
    assert numbers(tmp_path) == complete


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: No space left on device (os error 28)"),
    ],
    ids=["of the system", "of safetensors"],
)
def test_a_failing_disk_is_one_line_in_the_words_of_the_system(
    tmp_path: Path, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = PartWriter("server 1", tmp_path)

    def fail() -> None:
        raise error

    save(tmp_path, 100)
    with doing(fail, "snapshot.temporary"):
        for number in (200, 300):
            writer.start(lambda number=number: save(tmp_path, number) and None)
            writer.close()
    assert numbers(tmp_path) == [100]
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "server 1 cannot write its checkpoint" in sentence
    assert sentence.endswith(
        ": no space left on device; training goes on, and the checkpoint of step 100 stays"
    )
    writer.start(lambda: save(tmp_path, 400) and None)
    writer.close()
    assert numbers(tmp_path) == [400, 100]


def test_other_files_and_hostile_names_are_no_checkpoints(tmp_path: Path) -> None:
    version = save(tmp_path, 100)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "notes.txt").touch()
    (version.path / "shard-0-of-0.safetensors").touch()
    (version.path / "shard-7-of-99999.safetensors").touch()
    assert [found.number for found in versions_in(tmp_path)] == [100]
    assert version.shard_files() == [version.path / name for name in NAMES[:2]]
    assert versions_in(tmp_path / "nowhere") == []


@pytest.mark.parametrize("damage", ["begin", "middle", "end", 0, 7, 100])
def test_a_changed_byte_and_a_truncated_file_are_refused(tmp_path: Path, damage: str | int) -> None:
    file = tmp_path / "f"
    write_tensors(file, {"x": torch.arange(40.0)}, {"steps": 3})
    tensors, meta, _ = read_tensors_of(file, dict)
    assert torch.equal(tensors["x"], torch.arange(40.0)) and meta == {"steps": 3}
    data = bytearray(file.read_bytes())
    if isinstance(damage, int):
        del data[damage:]
    else:
        data[{"begin": 3, "middle": len(data) // 2, "end": -1}[damage]] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        read_tensors_of(file, dict)
