"""What collectives compute, for all ranks at once: the ranks are in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.call import Call, Op, as_reduced, divide, fill_identity
from shoal.comm.staging import FlatTensor, check_counts, counts_row, widened

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def carry_out(calls: Sequence[Call]) -> None:
    """Terms are added in the order of ranks."""
    kind = calls[0].kind
    if kind == "barrier":
        return
    stores = []
    if kind in ("reduce", "all_reduce", "reduce_scatter", "scan", "exclusive_scan"):
        wide = [widened(call, rank) for rank, call in enumerate(calls)]
        calls = [each.call for each in wide]
        stores = [each.store for each in wide]
    _KINDS[kind](calls)
    for store in stores:
        store()


def _inputs(calls: Sequence[Call]) -> list[Tensor]:
    return [FlatTensor(call.data).flat for call in calls if call.data is not None]


def _put(call: Call, values: Tensor) -> None:
    if call.out is not None:
        target = FlatTensor(call.out)
        if target.flat.data_ptr() != values.data_ptr():
            target.flat.copy_(values)
        target.store()


def _running(calls: Sequence[Call], keeps: bool) -> list[Tensor]:
    """The terms of ranks 0 to r combined; of the last rank alone, unless it `keeps` all."""
    parts = _inputs(calls)
    op = calls[0].op
    views, (op, *_) = zip(*(as_reduced(part, op) for part in parts), strict=True)
    wide = _WIDE.get(views[0].dtype, views[0].dtype)
    total = views[0].to(wide, copy=True)
    found = [total]
    for view in views[1:]:
        total = total.clone() if keeps else total
        op.combine(total, view.to(wide))
        found = [*found, total] if keeps else [total]
    if op is Op.MEAN:
        for count, each in enumerate(found, 1):
            divide(each, count if keeps else len(parts))
    return [each.to(views[0].dtype).view(-1).view(parts[0].dtype) for each in found]


def _total(calls: Sequence[Call]) -> Tensor:
    return _running(calls, keeps=False)[0]


def _all_reduce(calls: Sequence[Call]) -> None:
    total = _total(calls)
    for call in calls:
        _put(call, total)


def _reduce(calls: Sequence[Call]) -> None:
    total = _total(calls)
    _put(calls[calls[0].root], total)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    rows = _total(calls).view(len(calls), -1)
    for call, row in zip(calls, rows, strict=True):
        _put(call, row)


def _scan(calls: Sequence[Call]) -> None:
    for call, total in zip(calls, _running(calls, keeps=True), strict=True):
        _put(call, total)


def _exclusive_scan(calls: Sequence[Call]) -> None:
    sums = _running(calls, keeps=True)
    for rank, call in enumerate(calls):
        if rank:
            _put(call, sums[rank - 1])
        else:
            target = FlatTensor(call.out) if call.out is not None else None
            if target is not None:
                fill_identity(target.flat, call.op)
                target.store()


def _broadcast(calls: Sequence[Call]) -> None:
    root = calls[0].root
    given = _inputs(calls[root : root + 1])[0]
    for rank, call in enumerate(calls):
        if rank != root:
            _put(call, given)


def _all_gather(calls: Sequence[Call]) -> None:
    whole = torch.cat(_inputs(calls))
    for call in calls:
        _put(call, whole)


def _gather(calls: Sequence[Call]) -> None:
    _put(calls[calls[0].root], torch.cat(_inputs(calls)))


def _scatter(calls: Sequence[Call]) -> None:
    root = calls[0].root
    rows = _inputs(calls[root : root + 1])[0].view(len(calls), -1)
    for call, row in zip(calls, rows, strict=True):
        _put(call, row)


def _all_to_all(calls: Sequence[Call]) -> None:
    rows = torch.stack([flat.view(len(calls), -1) for flat in _inputs(calls)])
    for rank, call in enumerate(calls):
        _put(call, rows[:, rank].reshape(-1))


def _uneven(calls: Sequence[Call]) -> None:
    check_counts(torch.stack([counts_row(call) for call in calls]))
    pieces = [
        torch.split(flat, list(call.send_counts))
        for call, flat in zip(calls, _inputs(calls), strict=True)
    ]
    received = [torch.cat([row[rank] for row in pieces]) for rank in range(len(calls))]
    for call, values in zip(calls, received, strict=True):
        _put(call, values)


_KINDS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scan": _scan,
    "exclusive_scan": _exclusive_scan,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_uneven": _uneven,
}
