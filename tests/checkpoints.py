"""Checkpoints for tests: jobs that save them, and a look inside."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.strategy.strategy import parse
from shoal.train.checkpoints.files import digest_of
from shoal.train.checkpoints.tensor_file import file_digest
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.models import mlp, samples

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
    model: nn.Module | None = None,
    group: Group | None = None,
    strategy: str = "ddp",
    **options: Any,
) -> tuple[Job, Step]:
    job = Job(parse(strategy), group or solo_group(), device=CPU, seed=3)
    options = {"optimizer": MOMENTUM, **options}
    return job, job.step(model if model is not None else mlp(), F.cross_entropy, **options)


def save_some(path: Path, steps: int = 2, **options: Any) -> tuple[Job, Step]:
    job, step = start(**options)
    for batch in job.batches(samples(10 * steps), 10):
        step(batch)
    job.save(path, about={"name": "test"})
    return job, step


def manifest_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return document


def write_manifest(path: Path, document: Any, sign: bool = True) -> None:
    """Replace the manifest; with the digest that belongs to it, if `sign`."""
    if sign and isinstance(document, dict):
        document["sha256"] = digest_of(document)
    (path / "manifest.json").write_text(json.dumps(document))


def file_of(path: Path, part: str) -> Path:
    return path / str(manifest_of(path)["files"][part]["name"])


def sign_file(path: Path, part: str) -> None:
    """Write the digest of a file into the manifest, as an attacker would who has changed it."""
    file = file_of(path, part)
    with open(file, "rb") as handle:
        digest = file_digest(handle.fileno())
    document = manifest_of(path)
    document["files"][part].update(bytes=file.stat().st_size, xxh3=digest)
    write_manifest(path, document)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON document."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = []
    for key, value in list(items):
        found.append((tree, key))
        if isinstance(value, (dict, list)):
            found += places(value)
    return found
