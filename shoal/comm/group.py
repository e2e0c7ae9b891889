"""What a group of ranks can do together. Every operation returns Work; `wait` finishes it.

group.all_reduce(x)      checks the arguments, makes a Call
executor.submit(call)    Solo, SharedMemory, Torch, Scheduled, Hierarchical
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.call import Call, Op, Operand, PeerMessage, check_reducible, sent_bytes
from shoal.comm.executor import Executor
from shoal.comm.transport.shm.messages import ANY_SOURCE
from shoal.comm.transport.transport import Work
from shoal.errors import BadInput
from shoal.runtime.trace import SentBytes

__all__ = ["Group", "Op"]

_BARRIER = Call("barrier")
_SUM = Op.SUM  # an attribute of an enumeration costs more to look up


_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()


def group_by_number(number: int) -> Group:
    """The group of this process with that number: what a compiled graph knows of it."""
    return _groups[number]


class Group:
    """Ranks 0..size-1 of one axis. All ranks call the same collectives in the same order.

    Tensors are changed in place unless an `out` is given. Where a collective has a piece for each
    rank, the pieces lie one after the other in one tensor, or are a list of tensors. Until an
    operation has been waited for, its tensors must not be used.
    """

    def __init__(
        self, executor: Executor, timeout_s: float | None = None, sent: SentBytes | None = None
    ):
        """`timeout_s`: of every collective, instead of the executor's. `sent` counts bytes."""
        self._timeout_s = timeout_s
        self._sent = sent
        self.number = next(_numbers)
        _groups[self.number] = self
        self.bind(executor)

    def bind(self, executor: Executor) -> None:
        """Let `executor` carry out all calls from now on."""
        self.executor = executor
        self.rank = executor.rank
        self.size = executor.size
        is_plain = self._timeout_s is None and self._sent is None
        self._submit = executor.submit if is_plain else self._submit_with_options
        attributes = vars(self)
        for name in ("all_reduce", "broadcast"):
            attributes.pop(name, None)
        if self._timeout_s is None:
            # attributes of the instance come before methods: short messages save their checks
            attributes |= executor.shortcuts(self.all_reduce, self.broadcast, self._sent)

    # ------------------------------------------------------------------ point to point

    def send(self, data: Tensor, dst: int, tag: int = 0) -> Work:
        """`data` to rank `dst`, which calls `recv` with the same tag."""
        self._check_peer("send to", dst)
        if self._sent is not None:
            self._sent.total += data.nbytes
        return self.executor.send(data, dst, tag)

    def recv(self, into: Tensor, src: int, tag: int = 0) -> Work:
        """What rank `src` sends with this tag; some executors take ANY_SOURCE for `src`."""
        if src != ANY_SOURCE or not self.executor.any_source:
            self._check_peer("receive from", src)
        return self.executor.recv(into, src, tag)

    def exchange(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage]) -> Work:
        """Messages to and from other ranks at once: pairs that send to each other, rings, graphs.

        Tensors of a GPU may go over NCCL, which pairs the messages of two ranks in the order of
        their calls, whatever the tag, and where a send lasts until its receiver has called. So two
        ranks that send to each other call it, and not `send` and `recv`.
        """
        for data, peer, _ in sends:
            self._check_peer("send to", peer)
            if self._sent is not None:
                self._sent.total += data.nbytes
        for _, peer, _ in receives:
            self._check_peer("receive from", peer)
        return self.executor.exchange(sends, receives)

    # ------------------------------------------------------------------ collectives

    def broadcast(self, data: Tensor, root: int = 0) -> Work:
        self._check_root(root)
        return self._submit(Call("broadcast", data, data, _SUM, root))

    def reduce(self, data: Tensor, root: int = 0, op: Op = _SUM) -> Work:
        """The result at the root; what the other ranks hold afterwards is not defined."""
        self._check_root(root)
        check_reducible(data.dtype, op)
        return self._submit(Call("reduce", data, data, op, root))

    def all_reduce(self, data: Tensor, op: Op = _SUM, out: Tensor | None = None) -> Work:
        """The contributions of all ranks combined, in place or in `out`."""
        check_reducible(data.dtype, op)
        return self._submit(Call("all_reduce", data, _target("all_reduce", data, out), op))

    def gather(self, out: Operand | None, data: Tensor, root: int = 0) -> Work:
        """`out` is needed at the root only."""
        self._check_root(root)
        if self.rank != root:
            return self._submit(Call("gather", data, root=root))
        self._check_pieces("gather", "out", out, data.numel(), data.dtype)
        return self._submit(Call("gather", data, out, root=root))

    def scatter(self, out: Tensor, data: Operand | None, root: int = 0) -> Work:
        """`data` is needed at the root only."""
        self._check_root(root)
        if self.rank != root:
            return self._submit(Call("scatter", None, out, root=root))
        self._check_pieces("scatter", "data", data, out.numel(), out.dtype)
        return self._submit(Call("scatter", data, out, root=root))

    def all_gather(self, out: Operand, data: Tensor) -> Work:
        self._check_pieces("all_gather", "out", out, data.numel(), data.dtype)
        return self._submit(Call("all_gather", data, out))

    def reduce_scatter(self, out: Tensor, data: Operand, op: Op = _SUM) -> Work:
        """The combined piece of this rank in `out`; `data` is left as it was."""
        check_reducible(out.dtype, op)
        self._check_pieces("reduce_scatter", "data", data, out.numel(), out.dtype)
        return self._submit(Call("reduce_scatter", data, out, op))

    def all_to_all(self, out: Operand, data: Operand) -> Work:
        """Piece r of `data` goes to rank r, whose piece comes to the same place of `out`."""
        if isinstance(out, Tensor) != isinstance(data, Tensor):
            raise BadInput("all_to_all takes two tensors or two lists of tensors")
        one = data if isinstance(data, Tensor) else data[0]
        numel = one.numel() // self.size if one is data else one.numel()
        for name, pieces in (("data", data), ("out", out)):
            self._check_pieces("all_to_all", name, pieces, numel, one.dtype)
        return self._submit(Call("all_to_all", data, out))

    def all_to_all_uneven(
        self, out: Tensor, data: Tensor, recv_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        """`send_counts[r]` elements of `data` go to rank r, `recv_counts[r]` come from it."""
        for name, tensor, counts in (("out", out, recv_counts), ("data", data, send_counts)):
            if len(counts) != self.size or min(counts) < 0 or sum(counts) != tensor.numel():
                raise BadInput(
                    f"all_to_all_uneven over {self.size} ranks: the counts {list(counts)} do not "
                    f"divide the {tensor.numel()} elements of `{name}` among the ranks"
                )
        if out.dtype != data.dtype:
            raise BadInput(f"all_to_all_uneven cannot bring {data.dtype} into {out.dtype}")
        received = tuple(recv_counts)
        sent = tuple(send_counts)
        return self._submit(Call("all_to_all_uneven", data, out, _SUM, 0, received, sent))

    def scan(
        self, data: Tensor, op: Op = _SUM, exclusive: bool = False, out: Tensor | None = None
    ) -> Work:
        """Ranks 0 to r combined at rank r, in place or in `out`.

        Exclusive: ranks 0 to r-1, and at rank 0 what an empty sum, product, … is.
        """
        check_reducible(data.dtype, op)
        kind = "exclusive_scan" if exclusive else "scan"
        return self._submit(Call(kind, data, _target("scan", data, out), op))

    def barrier(self) -> Work:
        return self._submit(_BARRIER)

    # ------------------------------------------------------------------ other groups

    def duplicate(self) -> Group:
        """The same ranks with an order of operations of their own; all ranks call it."""
        executor = self.executor.split(range(self.size))
        assert executor is not None
        return Group(executor)

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """The group of some of these ranks, in that order; None for a rank that is not in it.

        All ranks call it, in the same order, as with `duplicate`.
        """
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.size)):
            raise BadInput(f"a subgroup needs different ranks below {self.size}, not {list(ranks)}")
        executor = self.executor.split(ranks)
        return None if executor is None else Group(executor)

    def __deepcopy__(self, memo: object) -> Group:
        """A copy of a model, such as torch's AveragedModel, has the same ranks."""
        return self

    def with_timeout(self, timeout_s: float) -> Group:
        """This group, whose collectives wait for other ranks no longer than `timeout_s`."""
        return Group(self.executor, timeout_s, self._sent)

    def counted(self, sent: SentBytes) -> Group:
        """This group, whose calls add what this rank sends to `sent`."""
        return Group(self.executor, self._timeout_s, sent)

    def close(self) -> None:
        """Leave. Operations that have not been waited for are abandoned; safe to call twice."""
        self.executor.close()

    # ------------------------------------------------------------------ checks

    def _submit_with_options(self, call: Call) -> Work:
        if self._sent is not None:
            named = self.executor.bytes_sent(call) if call.kind == "all_reduce" else None
            sent = sent_bytes(call, self.rank, self.size) if named is None else named
            self._sent.total += sent
        return self.executor.submit(call._replace(timeout_s=self._timeout_s))

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise BadInput(f"the root must be one of the ranks 0 to {self.size - 1}, not {root}")

    def _check_peer(self, verb: str, peer: int) -> None:
        if self.size == 1:
            raise BadInput(f"a group of one rank has no other rank to {verb}")
        if not 0 <= peer < self.size:
            ranks = f"0 to {self.size - 1}"
            raise BadInput(f"rank {self.rank} cannot {verb} rank {peer}: the ranks are {ranks}")

    def _check_pieces(
        self, kind: str, name: str, pieces: Operand | None, numel: int, dtype: torch.dtype
    ) -> None:
        """`pieces` has to hold as much for every rank."""
        if pieces is None:
            raise BadInput(f"rank {self.rank} is the root of this {kind}: it needs `{name}`")
        if isinstance(pieces, Tensor):
            fits = pieces.numel() == numel * self.size and pieces.dtype == dtype
        else:
            fits = len(pieces) == self.size
            fits = fits and all(p.numel() == numel and p.dtype == dtype for p in pieces)
        if not fits:
            shown = [pieces] if isinstance(pieces, Tensor) else pieces[:3]
            given = ", ".join(f"{tensor.numel()} {tensor.dtype}" for tensor in shown)
            raise BadInput(
                f"{kind} over {self.size} ranks needs {numel} {dtype} for each of them in "
                f"`{name}`, in one tensor or in a list of {self.size}, not {given}"
            )


def _target(kind: str, data: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return data
    if out.numel() != data.numel() or out.dtype != data.dtype:
        raise BadInput(
            f"{kind} of {data.numel()} {data.dtype} needs as many in `out`, not {out.numel()} "
            f"{out.dtype}"
        )
    return out
