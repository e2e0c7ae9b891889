"""One of four ranks over NCCL is lost: what the others say, and that all of them end or go on."""

from __future__ import annotations

import pytest

from tests.gpu.lossy import ELASTIC, Ended, run, shoal, torchrun

pytestmark = pytest.mark.gpu

_IN = "lost rank 2 in all_reduce #9 of 340,096 bytes over NCCL"


def sentences(ended: Ended) -> str:
    """What the run said, after all of its processes have ended."""
    assert ended.status == 1 and ended.left == []
    said = "\n".join(line for _, line in ended.said)
    assert "deprecated" not in said and "frame #0" not in said, said
    return said


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_lost_rank_ends_the_others_with_one_sentence(how: str, hosts: int) -> None:
    said = sentences(run(how, *torchrun(4), hosts=hosts, SHOAL_STRATEGY="ddp"))
    assert _IN in said, said
    assert "a mistake of the script" in said or how == "kill"


STARTS = {"torchrun": torchrun(4), "shoal": shoal(4, "ddp", "--timeout", "8")}


@pytest.mark.parametrize("command", STARTS.values(), ids=STARTS)
def test_a_stopped_rank_is_named_when_the_limit_is_over(command: list[str]) -> None:
    said = sentences(run("stop", *command, SHOAL_TIMEOUT="8", SHOAL_STRATEGY="ddp"))
    ends = (
        "lost rank 2 after 8 s in all_reduce #9",
        "worker 2 has been stopped for 8 s and is killed",
    )
    assert "is stopped) in all_reduce #9" in said and any(end in said for end in ends), said


@pytest.mark.parametrize("strategy", ELASTIC)
def test_elastic_runs_go_on_over_nccl_with_the_losses_of_host_memory(strategy: str) -> None:
    over = {way: run("kill", *shoal(4, strategy), over=way) for way in ("nccl", "host")}
    losses = {way: [float(words[1]) for words in run.losses] for way, run in over.items()}
    assert [run.status for run in over.values()] == [0, 0]
    assert over["nccl"].losses[-1][2:4] == ["ElasticNccl", "3"]
    assert losses["nccl"] == pytest.approx(losses["host"], abs=1e-5)
