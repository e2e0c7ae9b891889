"""The digits example: its data, its model, and a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.commands.examples import clicks, digits
from shoal.strategy.strategy import parse
from shoal.train.checkpoints.files import read_manifest
from shoal.train.job import Job

SHORT = digits.read_options(["--epochs", "1"])


def make_job(group: Group | None = None, seed: int = 0) -> Job:
    if group is None:  # ranks that are threads share torch's generator, and load their weights
        group = solo_group()
        torch.manual_seed(seed)
    strategy = parse("ddp" if group.size > 1 else "single")
    return Job(strategy, group, device=torch.device("cpu"), seed=seed)


def test_the_data_are_1797_images_of_8_by_8_split_the_same_way_every_time() -> None:
    """Pixels are sixteenths; every digit is there as often as the source says."""
    train, test = digits.load_digits()
    (train_images, train_digits), (test_images, test_digits) = train.tensors, test.tensors
    assert train_images.shape == (1500, 1, 8, 8) and train_images.dtype == torch.float32
    assert test_images.shape == (297, 1, 8, 8) and train_digits.dtype == torch.int64
    everything = torch.cat([train_digits, test_digits])
    expected = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.bincount(everything).tolist() == expected
    assert torch.bincount(test_digits).tolist() == [27, 25, 35, 28, 38, 25, 30, 31, 23, 35]
    pixels = torch.cat([train_images, test_images]) * 16
    assert torch.equal(pixels, pixels.round())
    assert pixels.min() == 0 and pixels.max() == 16
    again = digits.load_digits.__wrapped__()[0].tensors
    assert torch.equal(train_images, again[0]) and torch.equal(train_digits, again[1])


def test_no_test_image_is_trained_on() -> None:
    train, test = digits.load_digits()
    seen = {tuple(image) for image in train.tensors[0].flatten(1).tolist()}
    assert len(seen) == 1500  # no image is in the data twice, so equal pixels are the same image
    assert not any(tuple(image) in seen for image in test.tensors[0].flatten(1).tolist())


def test_three_epochs_are_enough_for_95_percent(capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job()
    digits.train(job, SHORT.but(epochs=3))
    assert job.steps == 3 * 24
    accuracy = float(capsys.readouterr().out.split()[2].rstrip("%,"))
    assert accuracy > 95


@pytest.mark.parametrize("example", [digits, clicks])
def test_a_stopped_and_resumed_run_is_the_run_that_was_not_stopped(
    example: Any, tmp_path: Path
) -> None:
    small = ["--samples", "2000", "--rows", "4000", "--dim", "4"]
    options = example.read_options(["--epochs", "2", *(small if example is clicks else [])])
    whole, parts = (str(tmp_path / name) for name in ("whole", "parts"))
    example.train(make_job(), options.but(steps=14, out=whole))
    example.train(make_job(), options.but(steps=5, out=parts))
    example.train(make_job(), options.but(steps=14, out=parts, resume=True))
    assert read_manifest(Path(parts))["steps"] == 14
    about = options.about(example.__name__.rpartition(".")[2])
    expected = example.evaluate(make_job(), whole, about)
    assert example.evaluate(make_job(), parts, about) == expected


def test_save_every_saves_the_step_it_names(tmp_path: Path) -> None:
    job = make_job()
    saved: list[int] = []
    job.save = lambda path, about=None: saved.append(job.steps)  # type: ignore[method-assign]
    digits.train(job, SHORT.but(steps=7, out=str(tmp_path), save_every=3))
    assert saved == [3, 6, 7]
    digits.train(job, SHORT.but(steps=8))
    assert saved == [3, 6, 7], "without --out nothing is saved"
