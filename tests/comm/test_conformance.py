"""One conformance suite, against every executor, on threads; and over Gloo on processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.comm.executors.solo import solo_group
from shoal.errors import PeerLost, ShoalError
from tests.comm.conformance import CASES, check
from tests.comm.executors import EXECUTORS, cannot_run
from tests.processes import findings

PROCESSES = 3
every_case = pytest.mark.parametrize("case", CASES)


@every_case
@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_executor(executor: str, case: str) -> None:
    if cannot_run(executor, case):
        pytest.skip("nothing goes on before it is waited for")
    for found in EXECUTORS[executor](CASES[case]):
        check(found)


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one world of processes reports; they have all ended."""
    return findings("tests.comm.worker", PROCESSES, tmp_path_factory.mktemp("gloo"))


@every_case
@pytest.mark.parametrize("where", ["world", "pair", "messages"])
def test_torch_executor_over_gloo(gloo: list[dict[str, Any]], where: str, case: str) -> None:
    """The world has 3 ranks; the pair has 2, whose ranks inside are not those in the world."""
    outcomes = [report[where][case] for report in gloo if where in report]
    assert len(outcomes) == (2 if where == "pair" else 3)
    for error in outcomes:
        if where == "pair" and "subgroups" in case:
            assert error is not None and "cut out of the whole world" in error
        else:
            assert error is None, error


def test_a_process_that_goes_away_is_a_lost_peer(gloo: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(gloo[:-1]):
        name, sentence = report["lost"]
        assert name == PeerLost.__name__
        assert sentence.startswith(f"rank {rank} lost a peer in all_reduce #")


def test_a_tensor_of_the_wrong_size_is_no_lost_peer(gloo: list[dict[str, Any]]) -> None:
    assert not {report["wrong_size"] for report in gloo} & {PeerLost.__name__, "none"}


def test_a_group_of_one_has_no_rank_to_send_to() -> None:
    with pytest.raises(ShoalError, match="no other rank to send to"):
        solo_group().send(torch.zeros(1), 0)
    with pytest.raises(ShoalError, match="no other rank to receive from"):
        solo_group().recv(torch.zeros(1), 0)
