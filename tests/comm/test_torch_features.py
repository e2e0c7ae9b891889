"""Every feature of torch.distributed gives the same bits as on Gloo, or is refused by Gloo."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.transport.shm.segment import is_built
from tests import forked
from tests.comm.torch_features import FEATURES, OURS, verdict

pytestmark = [
    pytest.mark.skipif(not is_built(), reason="built without a compiler"),
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).parents[2]
Answers = dict[str, tuple[list[str], list[str]]]


def answers_of(factory: pytest.TempPathFactory, worker_id: str, *words: str) -> Answers:
    """One run, which all processes of the tests share."""
    folder = factory.getbasetemp()
    shared = folder if worker_id == "master" else folder.parent
    path = shared / f"torch-features{'-'.join(words)}.json"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            done = forked.run(
                [sys.executable, "-m", "tests.comm.torch_features", *words, "--json", str(path)],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: Any, worker_id: str) -> Answers:
    return answers_of(tmp_path_factory, worker_id, "2")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: Any, worker_id: str) -> Answers:
    return answers_of(tmp_path_factory, worker_id, "4")


@pytest.mark.whole
@pytest.mark.parametrize("name", FEATURES)
def test_two_ranks_give_the_bits_of_gloo(two_ranks: Answers, name: str) -> None:
    gloo, ours = two_ranks[name]
    assert verdict(gloo, ours) != "different", f"gloo {gloo}\nshoal {ours}"
    if name in OURS:
        assert verdict(gloo, ours) == "only shoal does", ours


@pytest.mark.whole
@pytest.mark.parametrize("name", FEATURES)
def test_four_ranks_give_the_numbers_of_gloo(four_ranks: Answers, name: str) -> None:
    """Sums of four are rounded in another order."""
    gloo, ours = four_ranks[name]
    if verdict(gloo, ours) == "different":
        for ranks in zip(gloo, ours, strict=True):
            expected, found = map(json.loads, ranks)
            assert numbers(found) == pytest.approx(numbers(expected), abs=2e-3, nan_ok=True)
    if name in OURS:
        assert verdict(gloo, ours) == "only shoal does", ours


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.whole
def test_an_operator_that_is_not_there_is_named(two_ranks: Answers) -> None:
    for answer in two_ranks["all reduce with a factor"][1]:
        assert "the shoal backend has no ReduceOp.PREMUL_SUM" in answer
