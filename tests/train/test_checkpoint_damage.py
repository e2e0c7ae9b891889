"""A checkpoint that is damaged, or missing, is refused with one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import CheckpointError
from shoal.train.checkpoints import files
from tests.chaos import checkpoint_damage, save_kills
from tests.checkpoints import file_of, manifest_of, save_some, sign_file, start, write_manifest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_some(tmp_path / "model")
    return tmp_path / "model"


def refused(path: Path, match: str) -> None:
    """`read` and `job.load` say the same, in one sentence."""
    job, _ = start()
    for load in (files.read, job.load):
        with pytest.raises(CheckpointError, match=match) as caught:
            load(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("keep", [None, 0, 7, 100])
def test_a_changed_file_is_noticed(saved: Path, part: str, keep: int | None) -> None:
    """A flipped byte, and a truncated file."""
    file = file_of(saved, part)
    data = bytearray(file.read_bytes())
    data[-3] ^= keep is None
    file.write_bytes(data[:keep])
    refused(saved, f"is damaged: .*{file.name}.* has changed")
    file.unlink()
    refused(saved, f"is damaged: .*{file.name}")


def test_a_file_that_is_no_safetensors_is_refused(saved: Path) -> None:
    document = manifest_of(saved)
    file = saved / "model-0-abcdef.safetensors"
    file.write_bytes(b"\xff" * 64)
    document["files"]["model"]["name"] = file.name
    write_manifest(saved, document)
    sign_file(saved, "model")
    refused(saved, r"is damaged: .*abcdef\.safetensors")


def test_a_file_that_would_block_a_reader_is_refused(saved: Path) -> None:
    file = file_of(saved, "model")
    file.unlink()
    os.mkfifo(file)
    refused(saved, rf"damaged: {file.name}")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "there is no checkpoint at")
    refused(tmp_path / "nowhere", "there is no checkpoint at")


@pytest.mark.parametrize(
    "text",
    ["", "{", "\x00\x01", "[" * 100_000, '{"a": ' * 100_000, "1" * 10_000, "nan", "\ufffd", "\xff"],
    ids=["empty", "cut", "binary", "deep list", "deep table", "huge", "nan", "strange", "no text"],
)
def test_a_manifest_that_is_no_json_is_refused(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text, encoding="latin-1" if text == "\xff" else "utf-8")
    refused(saved, "its manifest is not JSON")


@pytest.mark.parametrize("document", ["[]", "5", "null", '"text"'])
def test_a_manifest_of_another_form_is_refused(saved: Path, document: str) -> None:
    (saved / "manifest.json").write_text(document)
    refused(saved, "is not the manifest of a 'shoal checkpoint 4'")


def test_a_manifest_of_a_gigabyte_is_not_read(saved: Path) -> None:
    with open(saved / "manifest.json", "r+b") as file:
        file.truncate(1 << 30)  # a hole: it takes no place on the disk
    refused(saved, "its manifest is too large")


def renamed(name: Any) -> Callable[[Any], None]:
    return lambda document: document["files"]["model"].update(name=name)


NAMES = [
    *("../../etc/passwd", "/etc/passwd", "sub/model.safetensors", "..", ".", "", ".hidden"),
    *("a\x00b", "\ud800", "x" * 5000, None, 5, ["a"], {"a": 1}),
]
NO_COUNTS = [(k, v) for k in ("steps", "batches") for v in (-1, 1.5, 1e300, "5", None, [], {})]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        *((renamed(name), "is damaged") for name in NAMES),  # only files of its folder
        *((lambda d, k=k, v=v: d.update({k: v}), f"'{k}' is not a count") for k, v in NO_COUNTS),
        (dict.clear, "is not the manifest of a 'shoal checkpoint 4'"),
        (lambda d: d.update(format="shoal checkpoint 5"), "is not the manifest of a"),
    ],
)
def test_a_manifest_with_other_values_is_refused(
    saved: Path, change: Callable[[Any], None], match: str
) -> None:
    document = manifest_of(saved)
    change(document)
    write_manifest(saved, document)
    refused(saved, match)


def test_damaged_checkpoints_are_refused_or_give_the_right_state(whole_suite: bool) -> None:
    assert checkpoint_damage.main(["--count", "400" if whole_suite else "24"]) == 0


def test_killed_saves_leave_one_whole_checkpoint(capfd: pytest.CaptureFixture[str]) -> None:
    assert save_kills.main(["--count", "3"]) == 0, capfd.readouterr().out
