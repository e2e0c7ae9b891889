"""A checkpoint that is damaged, or missing, is refused with one sentence."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import CheckpointError
from shoal.train.checkpoints import files
from tests.chaos import checkpoint_damage, save_kills
from tests.checkpoints import (
    adamw_with_groups,
    file_of,
    manifest_of,
    places,
    save_some,
    start,
    write_manifest,
)


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
    entry = {"name": file.name, "bytes": 64, "sha256": sha256(file.read_bytes()).hexdigest()}
    document["files"]["model"] = entry
    write_manifest(saved, document)
    refused(saved, r"is damaged: .*abcdef\.safetensors")


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


def test_a_manifest_of_a_gigabyte_is_not_read(saved: Path) -> None:
    with open(saved / "manifest.json", "r+b") as file:
        file.truncate(1 << 30)  # a hole: it takes no place on the disk
    refused(saved, "its manifest is too large")


@pytest.mark.parametrize("document", [[], 5, None, "text", {}, {"format": "shoal checkpoint 3"}])
def test_a_manifest_of_another_form_is_refused(saved: Path, document: Any) -> None:
    write_manifest(saved, document)
    with pytest.raises(CheckpointError, match="is not the manifest of a 'shoal checkpoint 2'"):
        files.read(saved)


@pytest.mark.parametrize(
    "name",
    [
        *("../../etc/passwd", "/etc/passwd", "sub/model.safetensors", "..", ".", "", ".hidden"),
        *("a\x00b", "\ud800", "x" * 5000, None, 5, ["a"], {"a": 1}),
    ],
    ids=repr,
)
def test_a_manifest_names_files_of_its_folder_only(saved: Path, name: Any) -> None:
    document = manifest_of(saved)
    document["files"]["model"]["name"] = name
    write_manifest(saved, document)
    refused(saved, "is damaged")


@pytest.mark.parametrize("value", [-1, 1.5, 1e300, "5", None, [], {}])
@pytest.mark.parametrize("key", ["steps", "batches"])
def test_a_count_that_is_no_count_is_refused(saved: Path, key: str, value: Any) -> None:
    write_manifest(saved, {**manifest_of(saved), key: value})
    refused(saved, f"'{key}' is not a count")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint for all examples; each works on its own copy of the manifest."""
    path = tmp_path_factory.mktemp("fuzz") / "model"
    save_some(path, optimizer=adamw_with_groups)
    shutil.copy(path / "manifest.json", path.parent / "manifest.json")
    return path


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**30), 2**63])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["0.weight", "a/b", "../x", "params", "AdamW", "\x00", "\ud800"])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.just("0.weight"), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.whole
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_nothing_but_a_checkpoint_error_comes_out_of_a_strange_manifest(
    original: Path, data: st.DataObject
) -> None:
    document = json.loads((original.parent / "manifest.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        spots = places(document)
        container, key = spots[data.draw(st.integers(0, len(spots) - 1))]
        if data.draw(st.booleans()) or isinstance(container, list):
            container[key] = data.draw(values)
        else:
            del container[key]
    write_manifest(original, document)
    job, _ = start(optimizer=adamw_with_groups)
    try:
        job.load(original)
    except CheckpointError as error:
        assert "\n" not in str(error)


def test_damaged_checkpoints_are_refused_or_give_the_right_state() -> None:
    assert checkpoint_damage.main(["--count", "24"]) == 0


def test_killed_saves_leave_one_whole_checkpoint(capfd: pytest.CaptureFixture[str]) -> None:
    assert save_kills.main(["--count", "3"]) == 0, capfd.readouterr().out
