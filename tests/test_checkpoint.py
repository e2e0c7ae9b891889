"""Checkpoints: what was saved comes back, and what is damaged is told in a sentence."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from shoal import checkpoint
from shoal.errors import BadInput, CheckpointError, ShoalError
from shoal.group.group import Group
from shoal.group.solo import SoloGroup
from shoal.job import Job
from shoal.step import Step
from shoal.strategy import parse
from tests.conftest import World
from tests.models import convnet, mlp, samples

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=1e-2, amsgrad=True)


def adamw_with_groups(pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    pairs = list(pairs)
    groups = [
        {"params": [p for name, p in pairs if "bias" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in pairs if "bias" in name], "lr": 1e-3, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adam": ADAM, "adamw": adamw_with_groups}


def start(
    model: nn.Module | None = None, group: Group | None = None, **options: Any
) -> tuple[Job, Step]:
    job = Job(parse("ddp"), group or SoloGroup(), device=CPU, seed=3)
    options = {"optimizer": MOMENTUM, **options}
    return job, job.step(model if model is not None else mlp(), F.cross_entropy, **options)


def save_some(path: Path, steps: int = 2, **options: Any) -> tuple[Job, Step]:
    job, step = start(**options)
    for batch in job.batches(samples(10 * steps), 10):
        step(batch)
    job.save(path, about={"name": "test"})
    return job, step


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_some(tmp_path / "model")
    return tmp_path / "model"


def manifest_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return document


def write_manifest(path: Path, document: Any) -> None:
    (path / "manifest.json").write_text(json.dumps(document))


def file_of(path: Path, part: str) -> Path:
    return path / str(manifest_of(path)["files"][part]["name"])


# -------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_model_and_optimizer_come_back(tmp_path: Path, name: str) -> None:
    job, step = save_some(tmp_path, optimizer=OPTIMIZERS[name])
    again, step_again = start(mlp(seed=9), optimizer=OPTIMIZERS[name])
    assert again.load(tmp_path) == {"name": "test"}
    assert again.steps == job.steps == step_again.steps == 2
    for tensor_name, tensor in step.model.state_dict().items():
        assert torch.equal(step_again.model.state_dict()[tensor_name], tensor)
    assert flat_state(step_again) == flat_state(step)


def flat_state(step: Step) -> dict[str, Any]:
    document = step.update.optimizer.state_dict()
    found: dict[str, Any] = {"groups": document["param_groups"]}
    for index, state in document["state"].items():
        for key, value in state.items():
            found[f"{index}.{key}"] = value.tolist() if isinstance(value, Tensor) else value
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_continued_run_has_the_losses_of_one_that_was_never_stopped(
    tmp_path: Path, name: str
) -> None:
    """Stopped in the middle of the second of three shuffled epochs."""
    options = {"optimizer": OPTIMIZERS[name], "lr": lambda step: 0.05 / (1 + step)}
    job, step = start(**options)
    losses = []
    for batch in job.batches(samples(43), 10, epochs=3):
        losses.append(step(batch).item())
        if job.steps == 7:
            job.save(tmp_path)
    again, step_again = start(mlp(seed=9), **options)
    again.load(tmp_path)
    resumed = [step_again(b).item() for b in again.batches(samples(43), 10, epochs=3)]
    assert resumed == losses[7:]
    assert again.steps == job.steps == 15


def test_a_run_continues_twice(tmp_path: Path) -> None:
    losses = train_in_pieces(tmp_path / "whole", [8])
    assert train_in_pieces(tmp_path / "pieces", [3, 2, 3]) == losses


def train_in_pieces(path: Path, pieces: list[int]) -> list[float]:
    losses: list[float] = []
    for i, steps in enumerate(pieces):
        job, step = start()
        if i:
            job.load(path)
        for _, batch in zip(range(steps), job.batches(samples(20), 10, epochs=4), strict=False):
            losses.append(step(batch).item())
        job.save(path)
    return losses


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    save_some(tmp_path, steps=3)
    job, _ = start()
    job.load(tmp_path)
    assert list(job.batches(samples(30), 10)) == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
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


def test_loading_keeps_parameters_in_the_buffer(saved: Path) -> None:
    job, step = start(mlp(seed=9))
    job.load(saved)
    step.flat.data.fill_(7.0)
    assert all((p == 7.0).all() for p in step.model.parameters())


def test_several_models_of_one_script_come_back(tmp_path: Path) -> None:
    def pair(seed: int) -> tuple[Job, list[Step]]:
        job = Job(parse("single"), SoloGroup(), device=CPU)
        return job, [job.step(mlp(seed + i), F.cross_entropy, optimizer=MOMENTUM) for i in range(2)]

    job, steps = pair(0)
    for batch in job.batches(samples(20), 10):
        for step in steps:
            step(batch)
    job.save(tmp_path)
    again, others = pair(7)
    again.load(tmp_path)
    for step, other in zip(steps, others, strict=True):
        assert torch.equal(step.flat.data, other.flat.data)
    assert not torch.equal(steps[0].flat.data, steps[1].flat.data)


def test_a_trial_run_saves_nothing(tmp_path: Path) -> None:
    job, _ = start()
    job.dry = True
    job.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_manifest_tells_where_it_comes_from(saved: Path) -> None:
    document = manifest_of(saved)
    assert document["format"] == checkpoint.FORMAT
    assert (document["steps"], document["batches"], document["workers"]) == (2, 2, 1)
    assert (document["seed"], document["strategy"]) == (3, "ddp")
    assert document["about"] == {"name": "test"}


# -------------------------------------------------------------------------- other worlds


def losses_of(
    group: Group,
    model: nn.Module,
    batches: Callable[[Job], Iterator[Any]],
    path: Path,
    save_at: int | None = None,
    **options: Any,
) -> list[float]:
    """Train; save at a step, or else continue from there."""
    job, step = start(model, group, **options)
    if save_at is None:
        job.load(path)
    losses = []
    for batch in batches(job):
        losses.append(step(batch).item())
        if job.steps == save_at:
            job.save(path)
    return losses


def shuffled(job: Job) -> Iterator[Any]:
    return job.batches(samples(43, (1, 4, 4)), 10, epochs=2)


class Loader:
    """Like a DataLoader with a seeded sampler: iterated again it gives the same batches."""

    def __init__(self) -> None:
        x, y = samples(43, (1, 4, 4)).tensors
        self.batches = list(zip(x.split(10), y.split(10), strict=True))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def from_loader(job: Job) -> Iterator[Any]:
    return job.batches(Loader(), epochs=2)


def from_a_generator(job: Job) -> Iterator[Any]:
    return job.batches(batch for _ in range(2) for batch in Loader())


@pytest.mark.parametrize("batches", [shuffled, from_loader, from_a_generator])
@pytest.mark.parametrize("save_at", [3, 5, 7], ids=lambda n: f"after {n}")
def test_saved_on_two_replicas_and_continued_on_three_and_on_one(
    world: World, tmp_path: Path, batches: Callable[[Job], Iterator[Any]], save_at: int
) -> None:
    """In the middle of an epoch, at its end, and in the second one; BatchNorm included."""
    models = [convnet() for _ in range(2)]
    whole = world(2, lambda g: losses_of(g, models[g.rank], batches, tmp_path, save_at))[0]
    assert len(whole) == 10
    fresh = [convnet(seed=5) for _ in range(3)]
    for losses in world(3, lambda g: losses_of(g, fresh[g.rank], batches, tmp_path)):
        assert losses == pytest.approx(whole[save_at:], abs=2e-5)
    alone = losses_of(SoloGroup(), convnet(seed=6), batches, tmp_path)
    assert alone == pytest.approx(whole[save_at:], abs=2e-5)


def test_an_exact_run_continues_with_the_same_bits_elsewhere(world: World, tmp_path: Path) -> None:
    options: dict[str, Any] = {"exact": True, "microbatches": 6}

    def batches(job: Job) -> Iterator[Any]:
        return job.batches(samples(44, (1, 4, 4)), 16, epochs=2)

    models = [convnet() for _ in range(2)]
    whole = world(2, lambda g: losses_of(g, models[g.rank], batches, tmp_path, 2, **options))[0]
    fresh = [convnet(seed=5) for _ in range(3)]
    for losses in world(3, lambda g: losses_of(g, fresh[g.rank], batches, tmp_path, **options)):
        assert losses == whole[2:]


# -------------------------------------------------------------------------- damage


def refused(path: Path, match: str) -> None:
    """`read` and `job.load` say the same, in one sentence."""
    job, _ = start()
    for load in (checkpoint.read, job.load):
        with pytest.raises(CheckpointError, match=match) as caught:
            load(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_flipped_byte_is_noticed(saved: Path, part: str) -> None:
    file = file_of(saved, part)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    refused(saved, f"is damaged: .*{file.name}.* has changed")


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("keep", [0, 7, 100])
def test_a_truncated_file_is_noticed(saved: Path, part: str, keep: int) -> None:
    file = file_of(saved, part)
    file.write_bytes(file.read_bytes()[:keep])
    refused(saved, f"is damaged: .*{file.name}.* has changed")


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_missing_file_is_named(saved: Path, part: str) -> None:
    file = file_of(saved, part)
    file.unlink()
    refused(saved, f"is damaged: .*{file.name}")


def test_a_file_that_is_no_safetensors_is_refused(saved: Path) -> None:
    document = manifest_of(saved)
    file = saved / "model-0-abcdef.safetensors"
    file.write_bytes(b"\xff" * 64)
    entry = {"name": file.name, "bytes": 64, "sha256": checkpoint._digest(file)}
    document["files"]["model"] = entry
    write_manifest(saved, document)
    refused(saved, r"is damaged: .*abcdef\.safetensors")


def test_a_folder_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    refused(tmp_path, "there is no checkpoint at")
    refused(tmp_path / "nowhere", "there is no checkpoint at")


@pytest.mark.parametrize(
    "text",
    ["", "{", "\x00\x01", "[" * 100_000, '{"a": ' * 100_000, "1" * 10_000, "nan", "\ufffd"],
    ids=["empty", "cut", "binary", "deep list", "deep table", "huge", "nan", "strange"],
)
def test_a_manifest_that_is_no_json_is_told(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text)
    refused(saved, "its manifest is no JSON")


def test_a_manifest_that_is_no_text_is_told(saved: Path) -> None:
    (saved / "manifest.json").write_bytes(b"\xff\xfe\x00{}")
    refused(saved, "its manifest is no JSON")


def test_a_manifest_of_a_gigabyte_is_not_read(saved: Path) -> None:
    with open(saved / "manifest.json", "r+b") as file:
        file.truncate(1 << 30)  # a hole: it takes no place on the disk
    refused(saved, "its manifest is too large")


@pytest.mark.parametrize("document", [[], 5, None, "text", {}, {"format": "shoal checkpoint 2"}])
def test_a_manifest_of_another_form_is_told(saved: Path, document: Any) -> None:
    write_manifest(saved, document)
    with pytest.raises(CheckpointError, match="is no manifest of a 'shoal checkpoint 1'"):
        checkpoint.read(saved)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        ".hidden",
        "a\x00b",
        "\ud800",
        "x" * 5000,
        None,
        5,
        ["a"],
        {"a": 1},
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
def test_a_count_that_is_no_count_is_told(saved: Path, key: str, value: Any) -> None:
    write_manifest(saved, {**manifest_of(saved), key: value})
    refused(saved, f"'{key}' is no count")


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


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON document."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = []
    for key, value in list(items):
        found.append((tree, key))
        if isinstance(value, (dict, list)):
            found += places(value)
    return found


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


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.update(tied=[]),
        lambda model: model.update(tied={"0.weight": ["0.bias"]}),
        lambda model: model.update(steps="many"),
        lambda model: model.update(steps=-3),
        lambda model: model.update(optimizer=None),
        lambda model: model["optimizer"].update(groups=[5, 6]),
        lambda model: model["optimizer"].update(values=[]),
        lambda model: model["optimizer"].update(values={"0.weight": 3}),
        lambda model: model["optimizer"]["groups"][0].update(lr="fast"),
        lambda model: model["optimizer"]["groups"][1].update(betas=7),
        lambda model: model["optimizer"]["groups"][0].update(weight_decay=None),
    ],
    ids=[
        "tied is a list",
        "tied to a list",
        "steps is text",
        "steps below 0",
        "no optimizer",
        "groups are numbers",
        "values is a list",
        "a value is a number",
        "lr is text",
        "betas is a number",
        "weight_decay is nothing",
    ],
)
def test_a_wrong_type_in_the_manifest_is_told(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    save_some(tmp_path, optimizer=adamw_with_groups)
    document = manifest_of(tmp_path)
    change(document["models"][0])
    write_manifest(tmp_path, document)
    job, _ = start(optimizer=adamw_with_groups)
    with pytest.raises(CheckpointError):
        job.load(tmp_path)


# -------------------------------------------------------------------------- another script's


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


def test_another_optimizers_state_is_refused(saved: Path) -> None:
    job, _ = start(optimizer=ADAM)
    with pytest.raises(CheckpointError, match="has the state of SGD, and the script now trains"):
        job.load(saved)


def test_another_number_of_models_is_refused(saved: Path) -> None:
    job, _ = start()
    job.step(mlp(), F.cross_entropy, optimizer=SGD)
    with pytest.raises(CheckpointError, match="holds 1 models, and this one trains 2"):
        job.load(saved)


def test_there_has_to_be_a_model_to_load_into(saved: Path) -> None:
    job = Job(parse("single"), SoloGroup(), device=CPU)
    with pytest.raises(ShoalError, match=r"job\.load comes after job\.step"):
        job.load(saved)


# -------------------------------------------------------------------------- writing


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=repr)
def test_a_crash_before_the_manifest_is_replaced_leaves_the_old_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = checkpoint.read(saved)
    job, step = start(mlp(seed=9))
    step((torch.ones(4, 6), torch.zeros(4, dtype=torch.long)))

    def fail(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises((CheckpointError, KeyboardInterrupt)):
            job.save(saved)
    after = checkpoint.read(saved)
    assert after.document == before.document
    assert all(torch.equal(after.model[name], t) for name, t in before.model.items())
    job.save(saved)
    assert len(list(saved.iterdir())) == 3, "what the crash has left is gone"
    assert checkpoint.read(saved).document["steps"] == 1


def test_a_crash_while_tensors_are_written_leaves_the_old_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: dict[str, Tensor], file: Path) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    job, _ = start(mlp(seed=9))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fail)
        with pytest.raises(CheckpointError, match=r"cannot save a checkpoint at .*No space left"):
            job.save(saved)
    assert checkpoint.read(saved).document["steps"] == 2


def test_old_files_are_removed(saved: Path) -> None:
    old = set(saved.iterdir()) - {saved / "manifest.json"}
    save_some(saved, steps=3)
    assert not any(file.exists() for file in old)
    names = sorted(file.name.split("-")[0] for file in saved.iterdir())
    assert names == ["manifest.json", "model", "optimizer"]
    assert checkpoint.read(saved).document["steps"] == 3


def test_files_of_the_user_stay(saved: Path) -> None:
    """An export beside the checkpoint is nobody's business but the user's."""
    mine = [saved / "model-final.safetensors", saved / "optimizer-notes.safetensors"]
    for file in mine:
        file.write_bytes(b"mine")
    save_some(saved, steps=3)
    assert all(file.is_file() for file in mine)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    job, _ = start()
    with pytest.raises(CheckpointError, match="cannot save a checkpoint at"):
        job.save(tmp_path / "file" / "model")


def test_an_about_that_is_no_json_is_told_and_changes_nothing(saved: Path) -> None:
    job, _ = start()
    before = sorted(saved.iterdir())
    with pytest.raises(BadInput, match="about"):
        job.save(saved, about={"tensor": torch.ones(1)})
    assert checkpoint.read(saved).document["steps"] == 2
    assert sorted(saved.iterdir()) == before


def test_a_saved_model_is_readable_without_shoal(saved: Path) -> None:
    job, step = start()
    job.load(saved)
    tensors = load_file(file_of(saved, "model"))
    assert {f"0:{name}" for name in step.model.state_dict()} == set(tensors)
