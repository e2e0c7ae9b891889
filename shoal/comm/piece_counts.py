"""Do the ranks of an uneven all_to_all agree about every piece?

Each rank says what it sends to, and expects from, every rank, and how long an element is. All
ranks see the whole table, so that all of them refuse, and none waits for a piece that never comes.

    row of a rank    bytes of an element | p counts that it sends | p counts that it expects
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.call import Call
from shoal.errors import BadInput


def counts_row(call: Call) -> Tensor:
    """What one rank says about its pieces."""
    assert isinstance(call.data, Tensor)
    return torch.tensor([call.data.element_size(), *call.send_counts, *call.recv_counts])


def counts_table(size: int) -> Tensor:
    """Where the rows of all ranks are gathered."""
    return torch.empty(size, 1 + 2 * size, dtype=torch.int64)


def check_counts(table: Tensor) -> None:
    """Raise where a rank sends another piece than the rank that receives it expects."""
    size = len(table)
    width = table[:, 0]
    sent = table[:, 1 : 1 + size]
    expected = table[:, 1 + size :].t()  # [source, destination], as `sent`
    differ = (sent * width.view(-1, 1) != expected * width).nonzero()
    if len(differ):
        source, target = differ[0].tolist()
        gives = _in_words(int(sent[source, target]), int(width[source]))
        takes = _in_words(int(expected[source, target]), int(width[target]))
        raise BadInput(
            f"all_to_all_uneven over {size} ranks: rank {source} sends {gives} to rank {target}, "
            f"which expects {takes} from it: send_counts[{target}] of rank {source} and "
            f"recv_counts[{source}] of rank {target} must be equal"
        )


def _in_words(count: int, width: int) -> str:
    return f"{count} element{'s' * (count != 1)} of {width} byte{'s' * (width != 1)}"
