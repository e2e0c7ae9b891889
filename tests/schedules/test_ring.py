from __future__ import annotations

from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.transfer_table import Transfer as T

ADD = True
PUT = False


def test_ring_over_4_ranks_is_this() -> None:
    assert build("all_reduce", "ring", 4).rounds == (
        # reduce-scatter: chunk r grows on its way to rank r
        (T(0, 1, 3, ADD), T(1, 2, 0, ADD), T(2, 3, 1, ADD), T(3, 0, 2, ADD)),
        (T(0, 1, 2, ADD), T(1, 2, 3, ADD), T(2, 3, 0, ADD), T(3, 0, 1, ADD)),
        (T(0, 1, 1, ADD), T(1, 2, 2, ADD), T(2, 3, 3, ADD), T(3, 0, 0, ADD)),
        # all-gather: chunk r is handed on from rank r
        (T(0, 1, 0, PUT), T(1, 2, 1, PUT), T(2, 3, 2, PUT), T(3, 0, 3, PUT)),
        (T(0, 1, 3, PUT), T(1, 2, 0, PUT), T(2, 3, 1, PUT), T(3, 0, 2, PUT)),
        (T(0, 1, 2, PUT), T(1, 2, 3, PUT), T(2, 3, 0, PUT), T(3, 0, 1, PUT)),
    )


def test_slow_ring_over_4_ranks_uses_one_link_at_a_time() -> None:
    assert build("all_reduce", "slow_ring", 4).rounds == (
        (T(0, 1, 0, ADD),), (T(1, 2, 0, ADD),), (T(2, 3, 0, ADD),),
        (T(3, 0, 0, PUT),), (T(0, 1, 0, PUT),), (T(1, 2, 0, PUT),),
    )  # fmt: skip


def test_ring_broadcast_is_a_pipe() -> None:
    assert build("broadcast", "ring", 3, chunks=2).rounds == (
        (T(0, 1, 0, PUT),),
        (T(1, 2, 0, PUT), T(0, 1, 1, PUT)),
        (T(1, 2, 1, PUT),),
    )
