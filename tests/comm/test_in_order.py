"""Strategies keep to the rules of NCCL: see `in_order.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from shoal.comm.call import PeerMessage
from shoal.comm.group import Group
from shoal.errors import PeerLost
from shoal.schedules.pipelines.catalog import CATALOG
from tests.comm.conformance import CASES, check, contribution
from tests.comm.in_order import in_order_world
from tests.conftest import World
from tests.models import samples
from tests.splitting import ADAMW, GPT_OPTIONS, assert_equal, gpt, mlp, texts, train, workers
from tests.test_experts import Listed, mixture
from tests.test_experts import samples as rows

# messages of an executor without tags come in the order of the calls
CASES_IN_ORDER = [name for name in CASES if name != "send_and_recv_go_by_source_and_tag"]


@pytest.mark.parametrize("case", CASES_IN_ORDER)
def test_the_strict_executor_conforms(case: str) -> None:
    for found in in_order_world(3, CASES[case]):
        check(found)


def test_ranks_that_send_to_each_other_exchange() -> None:
    def exchange(group: Group) -> torch.Tensor:
        into = torch.zeros(4)
        given = contribution(group.rank, (4,))
        peer = 1 - group.rank
        group.exchange([PeerMessage(given, peer)], [PeerMessage(into, peer)]).wait()
        return into

    found = in_order_world(2, exchange)
    assert [t.tolist() for t in found] == [contribution(r, (4,)).tolist() for r in (1, 0)]


def test_ranks_that_send_before_they_receive_wait_for_each_other() -> None:
    def crossing(group: Group) -> None:
        sent = group.send(torch.zeros(4), 1 - group.rank)
        group.recv(torch.zeros(4), 1 - group.rank).wait()
        sent.wait()

    with pytest.raises(PeerLost):
        in_order_world(2, crossing)


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "ddp(bucket_mb=0.0001)", "zero(1)", "zero(2)", "zero(3)", "localsgd(every=1)"),
        *('ps(placement="rank0")', 'mapreduce(batch="mini")', 'gossip(graph="complete")'),
        *(f'pp(3, schedule="{name}", microbatches=4)' for name in CATALOG),
        *("ddp + pp(2)", "zero(3) + pp(2, microbatches=3)"),
    ],
)
def test_a_strategy_equals_one_worker(strategy: str) -> None:
    assert_equal(in_order_world, workers(strategy), strategy, mlp, samples(22), 8)


@pytest.mark.parametrize(
    "strategy", ["cp(3)", "pp(2) + cp(2)", "tp(2) + pp(2)", "zero(3) + tp(2)", "ddp + cp(2)"]
)
def test_a_split_transformer_equals_one_worker(strategy: str) -> None:
    assert_equal(in_order_world, workers(strategy), strategy, gpt, texts(8), 4, **GPT_OPTIONS)


@pytest.mark.parametrize("strategy", ["ddp + ep(2)", "ep(2) + pp(2)"])
def test_split_experts_equal_one_worker(strategy: str) -> None:
    options: dict[str, Any] = {"optimizer": ADAMW}
    make = partial(mixture, Listed)
    assert_equal(in_order_world, workers(strategy), strategy, make, rows(22), 6, **options)


def test_gossip_on_a_ring_has_the_weights_that_it_has_over_other_executors(world: World) -> None:
    def trained(group: Group) -> Any:
        return train(group, "gossip", mlp(), samples(32), 8)

    found = zip(in_order_world(4, trained), world(4, trained), strict=True)
    for (losses, state), (expected, weights) in found:
        assert losses == expected
        assert all(torch.equal(state[name], weights[name]) for name in weights)
