"""Damage checkpoints in every way, and load them.

    python -m tests.chaos.checkpoint_damage [--count 2400] [--seed 0]

A damaged checkpoint is refused in one sentence and changes nothing, or it gives the state that was
saved. Where the attacker computes the digests again, it is refused, or it gives what its files say
and the fused optimizer can train on from there.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shoal.errors import CheckpointError
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.chaos import read_numbers
from tests.checkpoints import (
    file_of,
    manifest_of,
    places,
    save_some,
    sign_file,
    start,
    write_manifest,
)
from tests.models import mlp

ADAM = partial(torch.optim.Adam, lr=1e-2, fused=True)
VALUES: list[Any] = [
    *(None, True, -1, 0, 7, 10**400, 0.5, float("nan"), "", "0.weight", "Adam", "\ud800"),
    *([], {}, [1, [2]], {"0.weight": {}}),
]
MATRIX = (16, 6)  # the shape of 0.weight
BATCH = (torch.ones(4, 6), torch.zeros(4, dtype=torch.long))


def flip(path: Path, chance: random.Random) -> None:
    """One bit of one file."""
    file = chance.choice(sorted(path.iterdir()))
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    """A file ends too early, or too late."""
    file = chance.choice(sorted(path.iterdir()))
    data = file.read_bytes()
    is_longer = chance.random() < 0.2
    file.write_bytes(data + b"\0" * 8 if is_longer else data[: chance.randrange(len(data))])


def swap(path: Path, chance: random.Random) -> None:
    """Files change places, with each other or with those of another checkpoint."""
    other = path.parent / "other"
    parts = [file_of(path, "model"), file_of(path, "optimizer")]
    source = chance.choice([*parts, file_of(other, "model"), other / "manifest.json"])
    target = chance.choice([file for file in (*parts, path / "manifest.json") if file != source])
    if chance.random() < 0.3:
        target.unlink()
    else:
        shutil.copy(source, target)


def edit(path: Path, chance: random.Random, sign: bool = False, first: bool = False) -> None:
    """Values of the manifest are replaced or removed."""
    document = manifest_of(path)
    for _ in range(chance.randint(1, 3)):
        container, key = chance.choice(places(document))
        if isinstance(container, dict) and chance.random() < 0.3:
            del container[key]
        else:
            container[key] = copy.deepcopy(chance.choice(VALUES))
    if first:
        document["format"] = "shoal checkpoint 1"
        document.pop("sha256", None)
    write_manifest(path, document, sign=sign)


def reshape(path: Path, chance: random.Random) -> None:
    """A tensor has another shape, type or name, or is missing; digests fit."""
    part = chance.choice(["model", "optimizer"])
    tensors = {name: tensor.clone() for name, tensor in load_file(file_of(path, part)).items()}
    name = chance.choice(sorted(tensors))
    tensor = tensors.pop(name)
    match chance.choice(["shorter", "longer", "other type", "renamed", "removed"]):
        case "shorter":
            tensors[name] = tensor.flatten()[:-1].clone()
        case "longer":
            tensors[name] = torch.cat([tensor.flatten(), torch.ones(5)])
        case "other type":
            tensors[name] = tensor.to(torch.int16)
        case "renamed":
            tensors[f"{name}x"] = tensor
    file = file_of(path, part)
    file.unlink()
    save_file(tensors, file)
    sign_file(path, part)


def break_header(path: Path, chance: random.Random) -> None:
    """Bits in the header of a tensor file flip; digests fit."""
    part = chance.choice(["model", "optimizer"])
    file = file_of(path, part)
    data = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    data[chance.randrange(end)] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    sign_file(path, part)


ATTACKS: dict[str, tuple[Callable[[Path, random.Random], None], bool]] = {
    # whether the digests fit afterwards
    "flipped bit": (flip, False),
    "other length": (cut, False),
    "swapped files": (swap, False),
    "edited manifest": (edit, False),
    "edited manifest, signed": (partial(edit, sign=True), True),
    "edited manifest, first format": (partial(edit, first=True), True),
    "other tensors, signed": (reshape, True),
    "broken header, signed": (break_header, True),
}


def state_of(job: Job, step: Step) -> str:
    """A digest of all that a checkpoint restores."""
    optimizer = step.update.optimizer.state_dict()
    tensors = [*step.model.state_dict().values()]
    numbers = [job.steps, step.steps, step.update.steps, optimizer["param_groups"]]
    for index in sorted(optimizer["state"]):
        entries = optimizer["state"][index]
        numbers.append([index, sorted(entries)])
        tensors += [torch.as_tensor(entries[key]) for key in sorted(entries)]
    digest = sha256(json.dumps(numbers).encode())
    for tensor in tensors:
        digest.update(f"{tensor.shape} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def begin() -> tuple[Job, Step]:
    job, step = start(mlp(seed=9), optimizer=ADAM)
    step(BATCH)
    return job, step


def judge(path: Path, right: str, is_signed: bool) -> str:
    """How a load has ended; what begins with "WRONG" must not be."""
    job, step = begin()
    before = state_of(job, step)
    try:
        job.load(path)
    except CheckpointError as error:
        if "\n" in str(error) or str(path) not in str(error):
            return f"WRONG: {str(error)[:100]!r} is no clear sentence"
        return "refused" if state_of(job, step) == before else "WRONG: refused, and changed"
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}"
    if state_of(job, step) == right:
        return "the right state"
    if not is_signed:
        return "WRONG: another state was loaded"
    saved = load_file(file_of(path, "model"))
    for name, tensor in step.model.state_dict().items():
        if not torch.equal(saved[f"0:{name}"], tensor):
            return "WRONG: other weights than the file has"
    step(BATCH)
    return "as its files say"


def main(words: list[str] | None = None) -> int:
    options = read_numbers(words, count=2400)
    chance = random.Random(options.seed)
    names = list(ATTACKS)
    endings: dict[str, Counter[str]] = {name: Counter() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        save_some(whole, steps=3, optimizer=ADAM)
        save_some(Path(folder) / "other", steps=2, optimizer=ADAM)
        job, step = begin()
        job.load(whole)
        right = state_of(job, step)
        for i in range(options.count):
            name = names[i % len(names)]
            attack, is_signed = ATTACKS[name]
            path = Path(folder) / "damaged"
            shutil.copytree(whole, path)
            attack(path, chance)
            endings[name][judge(path, right, is_signed)] += 1
            shutil.rmtree(path)
    return report(endings)


def report(endings: dict[str, Counter[str]]) -> int:
    wrong = 0
    for name, counts in endings.items():
        wrong += sum(count for ending, count in counts.items() if ending.startswith("WRONG"))
        told = ", ".join(f"{count} {ending}" for ending, count in counts.most_common())
        print(f"{name}: {counts.total()} times; {told}")
    print(f"checkpoint damage: {sum(c.total() for c in endings.values())} mutations, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
