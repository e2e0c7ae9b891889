"""Ranks that have four variables say to each other on which host they are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch.distributed as dist

from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import RunConfig
from shoal.worker.environment import Placement
from shoal.worker.host_ranks import RankHost, ask_hosts, meet, place

HOSTS = {name: name * 32 for name in "abc"}


def rank_host(host: str, local_rank: int | None, local_size: int | None, gpus: int) -> RankHost:
    return RankHost(HOSTS[host], local_rank, local_size, tuple(map(gpu, range(gpus))))


def gpu(number: int) -> str:
    return f"0ab12c34-0000-0000-0000-{number:012x}"


def placed(hosts: Sequence[RankHost]) -> list[tuple[int, int]]:
    """Local rank and size of every rank."""
    at = [Placement("torchrun", rank, len(hosts), 0, 1, "tcp://a:1") for rank in range(len(hosts))]
    found = [place(placement, hosts) for placement in at]
    return [(placement.local_rank, placement.local_size) for placement in found]


def test_ranks_are_counted_inside_their_host() -> None:
    hosts = [rank_host(host, None, None, 0) for host in "aaba"]
    assert placed(hosts) == [(0, 3), (1, 3), (0, 1), (2, 3)]


def test_variables_that_are_set_count_more() -> None:
    given = [(1, 2), (0, 2), (0, 1), (0, 1)]  # the host of the first two stands for four
    assert placed([rank_host("a", *local, 0) for local in given]) == given
    ranks_only = [rank_host("a", local, None, 0) for local in (1, 0)]
    assert placed(ranks_only) == [(1, 2), (0, 2)]
    apart = [rank_host(host, 0, 2, 0) for host in "ab"]  # containers that divide a machine
    assert placed(apart) == [(0, 2), (0, 2)]


def test_nccl_needs_a_gpu_for_every_rank_of_every_host() -> None:
    at = Placement("torchrun", 3, 4, 0, 1, "tcp://a:1")
    for gpus, expected in ((3, True), (2, False)):
        found = place(at, [rank_host(host, None, None, gpus) for host in "aaab"])
        assert found.has_gpu_each is expected
    agents = [rank_host("a", local_rank, 2, 8) for local_rank in (0, 1, 0, 1)]  # of torchrun
    assert not place(at, agents).has_gpu_each
    slurm = [RankHost(HOSTS["a"], rank, 4, (gpu(rank),)) for rank in range(4)]  # --gpus-per-task=1
    assert place(at, slurm).has_gpu_each


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([("a", 0, None), ("a", None, None)], "rank 0 has LOCAL_RANK=0, and rank 1 has no LOCAL_R"),
        ([("a", None, None), ("b", None, 2)], "rank 1 has LOCAL_WORLD_SIZE=2, and rank 0 has no"),
        ([("a", 0, None), ("b", 1, None)], "rank 1 has LOCAL_RANK 1 and LOCAL_WORLD_SIZE 1, and 1"),
        ([("a", None, 1), ("a", None, 1)], "rank 1 has LOCAL_RANK 1 and LOCAL_WORLD_SIZE 1, and 2"),
    ],
)
def test_variables_that_contradict_each_other_are_named(
    given: list[tuple[str, int | None, int | None]], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        placed([rank_host(*words, 0) for words in given])


def test_what_is_written_is_read_back_and_nothing_else_is() -> None:
    for said in (rank_host("a", None, None, 8), rank_host("b", 1, 2, 0)):
        assert RankHost.parse(msgspec.json.encode(said), 0) == said
    for written in (b"", b"\xff", b"another"):
        with pytest.raises(ShoalError, match="what rank 7 wrote"):
            RankHost.parse(written, 7)


def test_ranks_of_one_store_ask_each_other() -> None:
    store = dist.HashStore()

    def ask(rank: int) -> Placement:
        host = "a" if rank < 2 else "b"
        config = RunConfig.from_environment({"SHOAL_HOST_ID": host, "SHOAL_DEVICE": "cpu"})
        placement = Placement("torchrun", rank, 3, 0, 1, "tcp://a:1", knows_hosts=False)
        return ask_hosts(placement, config, 1, store)

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(ask, range(3)))
    assert [(each.local_rank, each.local_size) for each in found] == [(0, 2), (1, 2), (0, 1)]


def test_without_a_key_they_do_not_meet() -> None:
    config = RunConfig.from_environment({"HOME": "/nonexistent", "MASTER_ADDR": "node1"})
    placement = Placement("torchrun", 0, 2, 0, 1, "tcp://node1:1", knows_hosts=False)
    with pytest.raises(BadInput, match=r"localhost where all ranks are on one host.*shoal keys"):
        meet(placement, config, is_cuda=False)
