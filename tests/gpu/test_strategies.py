"""Every strategy over NCCL equals one device: ranks have a GPU each, or share what there is."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.comm.torch_ranks import forked_ranks
from tests.gpu.strategies import TOLERANCES, differences

pytestmark = pytest.mark.gpu

# those of a line, whose groups are alike, train one after the other on the same ranks: their start
# takes longest
ON_ANY = (
    ("ddp", "zero(1)", "zero(2)", "zero(3)"),
    ("zero(1, offload=True)", "zero(2, offload=True)", "zero(3, offload=True)"),
    ('ps(placement="rank0")', 'ps(placement="workers")'),
    ("localsgd(every=1)", 'mapreduce(batch="mini")', 'gossip(graph="complete")'),
)
ON_2 = (
    ("tp(2)", "cp(2)", "ep(2)"),
    ("pp(2)", 'pp(2, schedule="gpipe")'),
    ('pp(2, schedule="zb-h1")', 'pp(2, schedule="interleaved")'),
)
ON_4 = (
    ("pp(4)", 'pp(4, schedule="zb-h2")'),
    ("cp(4)", "ep(4)"),
    ("ddp + tp(2)", "zero(3) + tp(2)"),
    ("ddp + cp(2)", "ddp + ep(2)"),
    ("ddp + pp(2)",),
    ("zero(3) + pp(2)",),
    ("tp(2) + pp(2)",),
    ("pp(2) + cp(2)",),
    ("ep(2) + pp(2)",),
)
CASES = [(2, s) for s in (*ON_ANY, *ON_2)] + [(4, s) for s in (*ON_ANY, *ON_4)]


@pytest.mark.parametrize(("size", "strategies"), CASES, ids=str)
def test_strategies_over_nccl_equal_one_device(
    tmp_path: Path, size: int, strategies: tuple[str, ...]
) -> None:
    body = partial(differences, size=size, strategies=strategies, folder=tmp_path)
    for found in forked_ranks(body, size):
        for (strategy, precision), difference in found.items():
            assert difference < TOLERANCES[precision], (strategy, precision, difference)
