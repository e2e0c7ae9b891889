"""Counted bytes are those that a ring sends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.comm.counting import SentBytes
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group
from shoal.schedules.collectives.cost import Link
from shoal.transport.threads import Mailboxes, ThreadTransport
from shoal.transport.transport import Work
from tests.conftest import World


class Metered(ThreadTransport):
    """Adds up what is really sent."""

    sent = 0

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        self.sent += data.nbytes
        return super().send(data, dst, tag)


CALLS: dict[str, Callable[[Group], Work]] = {
    "all_reduce": lambda g: g.all_reduce(torch.ones(12 * g.size)),
    "all_gather": lambda g: g.all_gather(torch.empty(12 * g.size), torch.ones(12)),
    "reduce_scatter": lambda g: g.reduce_scatter(torch.empty(12), torch.ones(12 * g.size)),
    "all_to_all": lambda g: g.all_to_all(torch.empty(12 * g.size), torch.ones(12 * g.size)),
    "star": lambda g: g.all_reduce(torch.ones(12 * g.size)),
}
RINGS = ("all_reduce", "all_gather", "reduce_scatter")
ALGORITHMS = {**dict.fromkeys(RINGS, "ring"), "all_to_all": "direct"}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CALLS)
def test_the_count_is_what_leaves_a_rank(world: World, name: str, size: int) -> None:
    boxes = Mailboxes(size)

    def body(group: Group) -> tuple[int, int]:
        transport = Metered(boxes, group.rank)
        counted = SentBytes()
        algorithms = {**ALGORITHMS, **({"all_reduce": "star"} if name == "star" else {})}
        CALLS[name](Group(Scheduled(transport, algorithms, link=Link()), sent=counted)).wait()
        return counted.total, transport.sent

    for counted, sent in world(size, body):
        assert counted == sent > 0


def test_what_is_no_part_of_training_is_not_counted(world: World) -> None:
    def body(group: Group) -> int:
        counted = SentBytes()
        with counted.uncounted():
            group.counted(counted).all_reduce(torch.ones(10)).wait()
        return counted.total

    assert world(2, body) == [0, 0]
