"""Features of torch.distributed on two backends: do they give the same bits?

`python -m tests.comm.torch_features SIZE` runs them on Gloo and on Shoal, one after the other, in
one set of forked ranks per backend; it prints what differs, and fails.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from tests.comm.features import FEATURES, Rank, collectives, training, whole
from tests.comm.torch_ranks import forked_ranks

GROUPS = (collectives, training)
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


def run(backend: str, size: int, folder: Path) -> dict[str, list[str]]:
    """What each feature gives on every rank as text, or `refused: ` and why."""
    folder.mkdir()
    found = forked_ranks(lambda rank: _ranks_part(backend, Rank(rank, size, folder)), size)
    return {name: [ranks[name] for ranks in found] for name in FEATURES}


def is_refusal(answers: Sequence[str]) -> bool:
    return all(answer.startswith(_REFUSED) for answer in answers)


def _ranks_part(backend: str, at: Rank) -> dict[str, str]:
    shoal.register_backend()
    store = dist.FileStore(str(at.folder / "store"), at.size)
    _join(backend, at, store, "first")
    answers = {}
    for number, name in enumerate(FEATURES):
        answers[name] = _answer(name, at)
        refused = answers[name].startswith(_REFUSED)
        if _any_rank(refused, at, dist.PrefixStore(f"after {number}", store)):  # type: ignore[attr-defined]
            dist.destroy_process_group()  # it may be of no more use
            _join(backend, at, store, f"again {number}")
    dist.destroy_process_group()
    return answers


def _join(backend: str, at: Rank, store: Any, name: str) -> None:
    """All ranks try again where one of them could not connect: Gloo fails so under load."""
    for attempt in range(3):
        here = dist.PrefixStore(f"{name} {attempt}", store)  # type: ignore[attr-defined]
        failure = None
        try:
            dist.init_process_group(
                backend,
                store=here,
                rank=at.rank,
                world_size=at.size,
                timeout=timedelta(seconds=_PATIENCE_S),
            )
        except RuntimeError as error:
            failure = error
        if not _any_rank(failure is not None, at, dist.PrefixStore("met", here)):  # type: ignore[attr-defined]
            return
        if failure is None:
            dist.destroy_process_group()
        elif backend != "gloo":
            raise failure
    raise AssertionError(f"{backend} did not connect")


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


def agree(name: str, gloo: list[str], ours: list[str]) -> bool:
    """The same bits on two ranks; sums of more are rounded in another order."""
    if is_refusal(gloo) or name in OURS:
        return is_refusal(gloo) and not (is_refusal(ours) and name in OURS)
    if gloo == ours or len(ours) == 2:
        return gloo == ours
    expected, found = (list(_numbers([json.loads(text) for text in each])) for each in (gloo, ours))
    return len(expected) == len(found) and all(map(_is_near, expected, found))


def _is_near(a: float, b: float) -> bool:
    return abs(a - b) <= 2e-3 or (math.isnan(a) and math.isnan(b))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield float(value)


def main(size: int) -> None:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    double: Any = torch.compile(lambda x: x * 2, backend="aot_eager")
    double(torch.ones(1, requires_grad=True))  # loads the compiler once, before the forks
    with tempfile.TemporaryDirectory() as folder:
        gloo, ours = (run(backend, size, Path(folder) / backend) for backend in ("gloo", "shoal"))
    wrong = [name for name in FEATURES if not agree(name, gloo[name], ours[name])]
    for name in wrong:
        print(f"{name}: gloo {gloo[name]}\nshoal {ours[name]}")
    assert "no ReduceOp.PREMUL_SUM" in ours["all reduce with a factor"][0]
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(int(sys.argv[1]))
