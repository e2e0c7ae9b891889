"""Checkpoints: what was saved comes back, also elsewhere."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput, CheckpointError, ShoalError
from shoal.runtime import checkpoint_folders
from shoal.strategy.strategy import parse
from shoal.train.checkpoints import files
from shoal.train.job import Job
from tests.chaos.save_kills import check_whole, fork, version
from tests.checkpoints import (
    ADAM,
    CPU,
    MOMENTUM,
    OPTIMIZERS,
    SGD,
    file_of,
    manifest_of,
    save_some,
    start,
)
from tests.conftest import World
from tests.jobs import losses
from tests.models import convnet, mlp, samples


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_some(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_continued_run_has_the_losses_of_one_that_was_never_stopped(
    tmp_path: Path, name: str
) -> None:
    """Stopped in the middle of the second of three shuffled epochs."""
    options = {"optimizer": OPTIMIZERS[name], "lr": lambda step: 0.05 / (1 + step)}
    train = partial(losses, lambda job: job.batches(samples(43), 10, epochs=3), tmp_path, **options)
    whole = train(7)
    assert len(whole) == 15
    assert train(None, load=True) == whole[7:]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(x)) * self.scale
        return out


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    job, step = start(Tied())
    x = torch.arange(7)
    step((x, x))
    job.save(tmp_path)
    assert sorted(load_file(file_of(tmp_path, "model"))) == ["0:embed.weight", "0:scale"]
    assert manifest_of(tmp_path)["models"][0]["tied"] == {"head.weight": "embed.weight"}
    model = Tied()
    again, step_again = start(model)
    again.load(tmp_path)
    assert torch.equal(model.embed.weight, step.model.embed.weight)  # type: ignore[arg-type]
    step_again((x, x))
    assert model.head.weight is model.embed.weight
    assert model.head.weight.data_ptr() == step_again.flat.data[step_again.flat.offset :].data_ptr()


def test_a_file_that_was_loaded_is_not_kept(tmp_path: Path) -> None:
    """Neither mapped nor open: the next save may give its place on the disk back."""
    save_some(tmp_path)
    job, step = start()
    job.load(tmp_path)
    assert step.update.optimizer.state
    for kept in ("maps", "fd"):
        path = Path("/proc/self") / kept
        lines = path.read_text() if kept == "maps" else str([os.readlink(f) for f in _files(path)])
        assert str(tmp_path) not in lines


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_symlink()]


def test_the_manifest_tells_where_it_comes_from(saved: Path) -> None:
    document = manifest_of(saved)
    assert document["format"] == files.FORMAT
    assert (document["steps"], document["batches"], document["workers"]) == (2, 2, 1)
    assert (document["seed"], document["strategy"]) == (3, "ddp")
    assert document["about"] == {"name": "test"}


def shuffled(job: Job) -> Iterator[Any]:
    return job.batches(samples(43, (1, 4, 4)), 10, epochs=2)


def loader() -> DataLoader[Any]:
    return DataLoader(samples(43, (1, 4, 4)), batch_size=10)


def from_loader(job: Job) -> Iterator[Any]:
    return job.batches(loader(), epochs=2)


def from_a_generator(job: Job) -> Iterator[Any]:
    return job.batches(batch for _ in range(2) for batch in loader())


def elsewhere(world: World, go: Callable[..., list[float]], save_at: int) -> list[list[float]]:
    """Of a run on two replicas the losses after it has saved, and those of three that go on."""
    models = [convnet(), convnet()]
    whole = world(2, lambda g: go(save_at, group=g, model=models[g.rank]))[0]
    fresh = [convnet(seed=5) for _ in range(3)]
    others = world(3, lambda g: go(None, load=True, group=g, model=fresh[g.rank]))
    return [whole[save_at:], *others]


@pytest.mark.product
@pytest.mark.parametrize("batches", [shuffled, from_loader, from_a_generator])
@pytest.mark.parametrize("save_at", [3, 5, 7], ids=lambda n: f"after {n}")
def test_saved_on_two_replicas_and_continued_on_three_and_on_one(
    world: World, tmp_path: Path, batches: Callable[[Job], Iterator[Any]], save_at: int
) -> None:
    """In the middle of an epoch, at its end, and in the second one; BatchNorm included."""
    go = partial(losses, batches, tmp_path, optimizer=MOMENTUM)
    wanted, *found = elsewhere(world, go, save_at)
    assert len(wanted) == 10 - save_at
    for continued in [*found, go(None, load=True, model=convnet(seed=6))]:
        assert continued == pytest.approx(wanted, abs=2e-5)


def test_an_exact_run_continues_with_the_same_bits_elsewhere(world: World, tmp_path: Path) -> None:
    options = {"optimizer": MOMENTUM, "exact": True, "microbatches": 6}
    data = samples(44, (1, 4, 4))
    go = partial(losses, lambda job: job.batches(data, 16, epochs=2), tmp_path, **options)
    wanted, *found = elsewhere(world, go, 2)
    assert wanted and found == [wanted] * 3


def test_another_models_tensor_is_named(saved: Path) -> None:
    def refuse(model: nn.Module, sentence: str) -> None:
        before = copy.deepcopy(model.state_dict())
        job, step = start(model)
        with pytest.raises(CheckpointError) as caught:
            job.load(saved)
        assert str(caught.value).endswith(f"is of another model: {sentence}")
        for name, tensor in step.model.state_dict().items():
            assert torch.equal(tensor, before[name]), "nothing was loaded"

    wide = mlp()
    wide[2] = nn.Linear(16, 13)
    wide[4] = nn.Linear(13, 3)
    refuse(wide, "2.weight is (12, 16) there and (13, 16) here")
    refuse(nn.Sequential(*mlp(), nn.Linear(3, 3)), "it has no tensor '5.weight'")
    refuse(nn.Sequential(*list(mlp())[:3]), "this one has no tensor '4.bias'")


def test_another_optimizer_number_of_models_or_none_at_all_is_refused(saved: Path) -> None:
    job, _ = start(optimizer=ADAM)
    with pytest.raises(CheckpointError, match="has the state of SGD, and the script now trains"):
        job.load(saved)
    job, _ = start()
    job.step(mlp(), F.cross_entropy, optimizer=SGD)
    with pytest.raises(CheckpointError, match="holds 1 models, and this one trains 2"):
        job.load(saved)
    job = Job(parse("single"), solo_group(), device=CPU)
    with pytest.raises(ShoalError, match=r"job\.load comes after job\.step"):
        job.load(saved)


def test_files_of_the_user_stay(saved: Path) -> None:
    """An export beside the checkpoint belongs to the user: it stays."""
    mine = [saved / "model-final.safetensors", saved / "optimizer-notes.safetensors"]
    for file in mine:
        file.write_bytes(b"mine")
    save_some(saved, steps=3)
    assert all(file.is_file() for file in mine)


def test_an_about_is_json_or_changes_nothing(saved: Path) -> None:
    job, _ = start()
    before = sorted(saved.iterdir())
    with pytest.raises(BadInput, match="about"):
        job.save(saved, about={"tensor": torch.ones(1)})
    assert sorted(saved.iterdir()) == before
    job.save(saved, about={2: "two", 10: "ten", "1": float("inf")})
    assert job.load(saved) == {"2": "two", "10": "ten", "1": float("inf")}


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


@pytest.mark.parametrize(
    ("module", "place", "remains"),
    [
        (files, "write_tensors", 1),
        (files, "digest_of", 1),
        (checkpoint_folders, "_remove_others", 2),
    ],
    ids=["before files", "after files", "before cleaning"],
)
def test_savers_of_one_folder_leave_the_version_that_was_named_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, place: str, remains: int
) -> None:
    once_before(monkeypatch, module, place, lambda: files.write(tmp_path, version(2)))
    files.write(tmp_path, version(1))
    assert check_whole(tmp_path) == remains
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("place", "reads"), [("open_file", 2), ("load_file", 1)], ids=["not yet open", "open"]
)
def test_a_reader_beside_a_saver_gets_a_whole_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, reads: int
) -> None:
    """The files that it is about to read are removed; those that it has opened stay readable."""
    files.write(tmp_path, version(1))
    once_before(monkeypatch, files, place, lambda: files.write(tmp_path, version(2)))
    assert check_whole(tmp_path) == reads


def killed_while_saving(path: Path, place: str) -> None:
    """A process that is killed when its save comes to a function."""

    def kill(*args: Any) -> None:
        if place == "write_tensors":
            args[1].write_bytes(b"half")
        if place != "sync_path" or args[0] == path:  # there: before the files have their names
            os.kill(os.getpid(), signal.SIGKILL)

    def save() -> None:
        setattr(checkpoint_folders if place == "sync_path" else files, place, kill)
        files.write(path, version(5))

    _, status = os.waitpid(fork(save), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("place", ["write_tensors", "digest_of", "sync_path"])
def test_what_a_killed_save_leaves_is_removed_by_the_next(tmp_path: Path, place: str) -> None:
    files.write(tmp_path, version(1))
    killed_while_saving(tmp_path, place)
    assert check_whole(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) > 3
    files.write(tmp_path, version(2))
    assert check_whole(tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_failed_save_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(tensors: dict[str, Tensor], file: Path, refuses_nan: bool) -> None:
        file.write_bytes(b"half")
        raise kind("no space left")

    files.write(tmp_path, version(1))
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(files, "write_tensors", fail)
    with pytest.raises(CheckpointError, match="no space left"):
        files.write(tmp_path, version(2))
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
        files.write(tmp_path, version(1))
    assert check_whole(tmp_path) == 1


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
    files.write(tmp_path / "new" / "run", version(1))
    partial = events[4].split(".")
    assert partial[:2] == ["manifest", "json"]
    folder = tmp_path.name.split("-")[0]
    assert events[:4] == ["new", folder, "model", "optimizer"]
    assert events[5:] == ["run", "rename", "run"]


@pytest.mark.parametrize("left", [(), ("model-1.safetensors",), ("lock", "manifest.json")])
def test_the_next_save_removes_what_a_killed_one_has_left(
    tmp_path: Path, left: tuple[str, ...]
) -> None:
    """Also of a saver that was killed while it removed its own files, the lock first."""
    workplace = tmp_path / "saving-aaaaaaaaaaaa"
    workplace.mkdir()
    for name in left:
        (workplace / name).touch()
    with checkpoint_folders.new_version(tmp_path) as version:
        version.publish(b'{"files": {}}')
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]
