"""A collective in one of the processes of `shoal collectives run`, by a named algorithm.

Run as `python -m shoal.commands.collective_worker FOLDER`; the folder has `plan.json`, and every
rank writes what it has found beside it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shoal
from shoal.comm.call import Op
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group
from shoal.comm.transport.transport import TorchTransport, Work
from shoal.observe.calibration.kernels import sample_rounds

_CALLS = 2  # of a measurement
_ROUNDS = 9


class CountingTransport(TorchTransport):
    """Counts the bytes that it is given, by the rank that they are for."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = Counter[int]()

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        self.sent[dst] += data.nbytes
        return super().send(data, dst, tag)


def carry_out(group: Group, kind: str, mine: Tensor, piece: int, plan: dict[str, Any]) -> Any:
    """What this rank has afterwards; None where it is left with nothing new."""
    root = plan["root"]
    op = Op(plan["op"])
    is_root = group.rank == plan["root"]
    small = mine.new_empty(piece)
    whole = mine.new_empty(piece * group.size)
    at_root = whole if is_root else None
    copy = mine if is_root else small
    calls: dict[str, tuple[Callable[..., Work], tuple[Any, ...], Tensor | None]] = {
        "broadcast": (group.broadcast, (copy, root), copy),
        "reduce": (group.reduce, (mine, root, op), mine if is_root else None),
        "all_reduce": (group.all_reduce, (mine, op), mine),
        "scan": (group.scan, (mine, op), mine),
        "exclusive_scan": (group.scan, (mine, op, True), mine),
        "scatter": (group.scatter, (small, mine if is_root else None, root), small),
        "gather": (group.gather, (at_root, mine, root), at_root),
        "all_gather": (group.all_gather, (whole, mine), whole),
        "reduce_scatter": (group.reduce_scatter, (small, mine, op), small),
        "all_to_all": (group.all_to_all, (whole, mine), whole),
        "barrier": (group.barrier, (), None),
    }
    if kind not in calls:
        return _message(group, kind, mine, small, root)
    call, given, result = calls[kind]
    call(*given).wait()
    return result


def _message(group: Group, kind: str, mine: Tensor, into: Tensor, root: int) -> Tensor | None:
    """push: the root sends to the rank after it. pull: it asks that rank, which sends then."""
    peer = (root + 1) % group.size
    asks, tells = (root, peer) if kind == "pull" else (peer, root)
    request = torch.zeros(1, dtype=torch.uint8)
    if group.rank == asks:
        if kind == "pull":
            group.send(request, tells).wait()
        group.recv(into, tells).wait()
        return into
    if group.rank == tells:
        if kind == "pull":
            group.recv(request, asks).wait()
        group.send(mine, asks).wait()
    return None


def _meet(group: Group) -> None:
    group.barrier().wait()


def timed(plan: dict[str, Any], world: Group) -> list[float]:
    """The median seconds of a call over each number of ranks that this one is among."""
    found = []
    for ranks in plan["measured"]:
        group = world.subgroup(range(ranks))
        if group is None:
            continue
        piece = max(1, plan["bytes"] // 4 // (ranks if plan["divided"] else 1))
        mine = torch.zeros(piece * (ranks if plan["takes_pieces"] else 1))
        call = partial(carry_out, group, plan["kind"], mine, piece, plan)
        found.append(sample_rounds(call, _CALLS, _ROUNDS, partial(_meet, group)).median_s)
    return found


def main(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    algorithms = {plan["kind"]: plan["algorithm"]} if plan["algorithm"] else {}

    def train(job: shoal.Job) -> None:
        torch.set_num_threads(1)
        group = job.group
        sent = Counter[int]()
        if job.size > 1:
            transport = CountingTransport()
            group = Group(Scheduled(transport, algorithms))
            sent = transport.sent
        if "measured" in plan:
            found: Any = timed(plan, group)
        else:
            mine = torch.tensor(plan["rows"][job.rank], dtype=getattr(torch, plan["dtype"]))
            found = carry_out(group, plan["kind"], mine, plan["piece"], plan)
            found = None if found is None else found.tolist()
        document = json.dumps({"found": found, "sent": sent})
        (folder / f"{job.rank}.json").write_text(document, encoding="utf-8")

    shoal.run(train)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
