"""Features of torch.distributed on two backends: do they give the same bits?

`python -m tests.comm.torch_features SIZE [NAME …] --json FILE` runs them on Gloo and on Shoal. All
features run in one set of forked ranks per backend, one after the other.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from tests.comm.features import collectives, functional, messages, saving, training
from tests.comm.features.feature import FEATURES, Rank, whole
from tests.comm.torch_ranks import forked_ranks

BACKENDS = ("gloo", "shoal")
GROUPS = (collectives, messages, functional, training, saving)
# what Gloo refuses
OURS = {
    "all_reduce AVG",
    "all_reduce of int16",
    "all gather into tensor",
    "all_to_all uneven",
    "all to all uneven on one rank only",
}
_REFUSED = "refused: "
_PATIENCE_S = 10


def run(backend: str, size: int, names: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """What each feature gives on every rank as text, or `refused: ` and why."""
    _quiet()
    found = forked_ranks(lambda rank: _ranks_part(backend, Rank(rank, size, folder), names), size)
    return {name: [ranks[name] for ranks in found] for name in names}


def _quiet() -> None:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def is_refusal(answers: Sequence[str]) -> bool:
    return all(answer.startswith(_REFUSED) for answer in answers)


def _ranks_part(backend: str, at: Rank, names: Sequence[str]) -> dict[str, str]:
    shoal.register_backend()
    store = dist.FileStore(str(at.folder / "store"), at.size)
    _join(backend, at, store, "first")
    answers = {}
    for number, name in enumerate(names):
        answers[name] = _answer(name, at)
        refused = answers[name].startswith(_REFUSED)
        if _any_rank(refused, at, dist.PrefixStore(f"after {number}", store)):  # type: ignore[attr-defined]
            dist.destroy_process_group()  # it may be of no more use
            _join(backend, at, store, f"again {number}")
    dist.destroy_process_group()
    return answers


def _join(backend: str, at: Rank, store: Any, name: str) -> None:
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, store),  # type: ignore[attr-defined]
        rank=at.rank,
        world_size=at.size,
        timeout=timedelta(seconds=_PATIENCE_S),
    )


def _any_rank(refused: bool, at: Rank, store: Any) -> bool:
    """Asked without the backend."""
    store.set(str(at.rank), str(int(refused)))
    return any(store.get(str(rank)) == b"1" for rank in range(at.size))


def _answer(name: str, at: Rank) -> str:
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            return json.dumps(_plain(FEATURES[name](at)))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{_REFUSED}{type(error).__name__}: {error} ({where.filename}:{where.lineno})"


def _plain(value: Any) -> Any:
    """Every bit of it as numbers: JSON keeps those of a double."""
    if isinstance(value, Tensor):
        data = whole(value.detach())
        if data.is_complex():
            data = torch.view_as_real(data)
        exact = data if data.dtype in (torch.int64, torch.bool) else data.double()
        return [str(value.dtype), list(value.shape), exact.tolist()]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def on_both(size: int, names: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """The answers of all ranks on Gloo and on Shoal, by feature."""
    _load_compiler()
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for backend in BACKENDS:
            (Path(folder) / backend).mkdir()
            results.append(run(backend, size, names, Path(folder) / backend))
    return {name: (results[0][name], results[1][name]) for name in names}


def _load_compiler() -> None:
    """Once, before the forks."""
    double: Any = torch.compile(lambda x: x * 2, backend="aot_eager")
    double(torch.ones(1, requires_grad=True))


def verdict(gloo: list[str], ours: list[str]) -> str:
    if is_refusal(gloo):
        return "refused by both" if is_refusal(ours) else "only shoal does"
    return "same bits" if gloo == ours else "different"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", type=int)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path, required=True, help="write the answers into this file")
    asked = parser.parse_args()
    asked.json.write_text(json.dumps(on_both(asked.size, asked.names or list(FEATURES))))


if __name__ == "__main__":
    main()
