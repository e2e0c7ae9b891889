"""Versions of a checkpoint in one folder: savers, readers and killed saves side by side."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.runtime import checkpoint_folders
from shoal.train import checkpoint
from shoal.train.checkpoint import Checkpoint
from tests.checkpoints import manifest_of, save_some, start, write_manifest


def small(number: int) -> Checkpoint:
    """A checkpoint whose tensors and manifest say `number`."""
    tensor = torch.full((64,), float(number))
    document = {"steps": number, "batches": number, "about": {"number": number}}
    return Checkpoint({"w": tensor}, {"w/m": tensor.clone()}, document)


def number_in(path: Path) -> int:
    """What the checkpoint says; all of it has to say the same."""
    saved = checkpoint.read(path)
    number: int = saved.document["about"]["number"]
    assert saved.document["steps"] == number
    for tensor in (saved.model["w"], saved.optimizer["w/m"]):
        assert torch.equal(tensor, torch.full((64,), float(number)))
    return number


def once_before(
    patch: pytest.MonkeyPatch, place: Any, name: str, action: Callable[[], None]
) -> None:
    """Run `action` before the next call of a function."""
    function = getattr(place, name)

    def call(*args: Any) -> Any:
        patch.setattr(place, name, function)
        action()
        return function(*args)

    patch.setattr(place, name, call)


@pytest.mark.parametrize("place", ["save_file", "digest_of"], ids=["before files", "after files"])
def test_a_saver_does_not_remove_the_files_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    once_before(monkeypatch, checkpoint, place, lambda: checkpoint.write(tmp_path, small(2)))
    checkpoint.write(tmp_path, small(1))
    assert number_in(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_a_saver_that_is_overtaken_leaves_the_newer_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its own rename and its cleaning another one saves, and ends."""
    remove = checkpoint_folders._remove_others

    def overtaken(folder: Path) -> None:
        monkeypatch.setattr(checkpoint_folders, "_remove_others", remove)
        checkpoint.write(tmp_path, small(2))
        remove(folder)

    monkeypatch.setattr(checkpoint_folders, "_remove_others", overtaken)
    checkpoint.write(tmp_path, small(1))
    assert number_in(tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("place", "reads"), [("open_file", 2), ("load_file", 1)], ids=["not yet open", "open"]
)
def test_a_reader_beside_a_saver_gets_a_whole_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, reads: int
) -> None:
    """The files that it is about to read are removed; those that it has opened stay readable."""
    checkpoint.write(tmp_path, small(1))
    once_before(monkeypatch, checkpoint, place, lambda: checkpoint.write(tmp_path, small(2)))
    assert number_in(tmp_path) == reads


def killed_while_saving(path: Path, place: str) -> None:
    """A process that is killed when its save comes to a function."""
    child = os.fork()
    if child == 0:
        try:
            module = checkpoint_folders if place == "sync_path" else checkpoint

            def kill(*args: Any) -> None:
                if place == "save_file":  # as safetensors does
                    (args[1].parent / ".tmpA1b2C3").write_bytes(b"half")
                if place == "sync_path" and args[0] != path:  # before the files have their names
                    return
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(module, place, kill)
            checkpoint.write(path, small(5))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("place", ["save_file", "digest_of", "sync_path"])
def test_what_a_killed_save_leaves_is_removed_by_the_next(tmp_path: Path, place: str) -> None:
    checkpoint.write(tmp_path, small(1))
    killed_while_saving(tmp_path, place)
    assert number_in(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) > 3
    checkpoint.write(tmp_path, small(2))
    assert number_in(tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_failed_save_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(tensors: dict[str, Tensor], file: Path) -> None:
        file.write_bytes(b"half")
        raise kind("no space left")

    checkpoint.write(tmp_path, small(1))
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(CheckpointError, match="no space left"):
        checkpoint.write(tmp_path, small(2))
    assert sorted(tmp_path.iterdir()) == before


def test_a_save_that_fails_after_its_rename_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail_at_last(folder: Path) -> None:
        calls.append(folder)
        if calls.count(tmp_path) == 2:
            raise OSError("the disk is gone")

    monkeypatch.setattr(checkpoint_folders, "sync_path", fail_at_last)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        checkpoint.write(tmp_path, small(1))
    assert number_in(tmp_path) == 1


def test_files_and_folder_are_durable_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-")[0])
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    checkpoint.write(tmp_path / "new" / "run", small(1))
    partial = events[4].split(".")
    assert partial[:2] == ["manifest", "json"]
    folder = tmp_path.name.split("-")[0]
    assert events[:4] == ["new", folder, "model", "optimizer"]
    assert events[5:] == ["run", "rename", "run"]


def test_a_flipped_bit_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    save_some(tmp_path)
    file = tmp_path / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"lr": 0.1', '"lr": 0.5'))
    assert file.read_text() != text
    job, step = start()
    with pytest.raises(CheckpointError, match=r"damaged: manifest\.json has changed"):
        job.load(tmp_path)
    assert step.update.optimizer.param_groups[0]["lr"] == 0.1


def test_a_checkpoint_of_the_format_without_digest_still_loads(tmp_path: Path) -> None:
    _, saved = save_some(tmp_path)
    document = manifest_of(tmp_path)
    document["format"] = "shoal checkpoint 1"
    del document["sha256"]
    write_manifest(tmp_path, document, sign=False)
    job, step = start()
    assert job.load(tmp_path) == {"name": "test"}
    assert torch.equal(step.flat.data, saved.flat.data)


def test_an_about_with_numbers_for_keys_can_be_read_again(tmp_path: Path) -> None:
    job, _ = start()
    job.save(tmp_path, about={2: "two", 10: "ten", "1": float("inf")})
    assert job.load(tmp_path) == {"2": "two", "10": "ten", "1": float("inf")}


def test_a_file_that_would_block_a_reader_is_refused(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, small(1))
    name = manifest_of(tmp_path)["files"]["model"]["name"]
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"damaged: {name}"):
        checkpoint.read(tmp_path)
