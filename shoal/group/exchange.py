"""A group over any transport in which each collective is one exchange of whole messages.

Everyone who has something to say sends it to everyone who needs it, and contributions are
combined in the order of ranks: one round, p-1 messages a rank, and the same bits on every rank.
Right for threads and small worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.group.group import Group, Op
from shoal.wire.threads import PendingWork
from shoal.wire.transport import Transport, Work

_SPACE = 1 << 40  # tags of one duplicate; user tags count up from its start, collectives above
_COLLECTIVES = 1 << 39


class ExchangeGroup:
    """Collectives as direct exchanges. A send goes out at once, receiving is done by `wait`."""

    def __init__(self, transport: Transport, space: int = 0):
        self._transport, self._space = transport, space
        self.rank, self.size = transport.rank, transport.size
        self._calls = self._duplicates = 0

    def send(self, data: Tensor, dst: int, tag: int = 0) -> Work:
        return self._transport.send(data.contiguous(), dst, self._space * _SPACE + tag)

    def recv(self, into: Tensor, src: int, tag: int = 0) -> Work:
        return self._transport.recv(into, src, self._space * _SPACE + tag)

    def broadcast(self, data: Tensor, root: int = 0) -> Work:
        message = data if self.rank == root else None
        return self._exchange(
            [message] * self.size,
            {root: data},
            lambda got: None if self.rank == root else _fill(data, got[root]),
        )

    def reduce(self, data: Tensor, root: int = 0, op: Op = Op.SUM) -> Work:
        outgoing = [data if rank == root else None for rank in range(self.size)]
        sources = dict.fromkeys(range(self.size), data) if self.rank == root else {}
        return self._exchange(
            outgoing, sources, lambda got: _fill(data, self._combine(got, op)) if got else None
        )

    def all_reduce(self, data: Tensor, op: Op = Op.SUM) -> Work:
        return self._exchange(
            [data] * self.size,
            dict.fromkeys(range(self.size), data),
            lambda got: _fill(data, self._combine(got, op)),
        )

    def gather(self, out: Tensor | None, data: Tensor, root: int = 0) -> Work:
        outgoing = [data if rank == root else None for rank in range(self.size)]
        sources = dict.fromkeys(range(self.size), data) if self.rank == root else {}

        def collect(got: dict[int, Tensor]) -> None:
            if out is not None and got:
                _fill(out, torch.cat([got[rank].flatten() for rank in range(self.size)]))

        return self._exchange(outgoing, sources, collect)

    def scatter(self, out: Tensor, data: Tensor | None, root: int = 0) -> Work:
        outgoing: list[Tensor | None] = [None] * self.size
        if self.rank == root and data is not None:
            outgoing = [*self._pieces(data)]
        return self._exchange(outgoing, {root: out}, lambda got: _fill(out, got[root]))

    def all_gather(self, out: Tensor, data: Tensor) -> Work:
        return self._exchange(
            [data] * self.size,
            dict.fromkeys(range(self.size), data),
            lambda got: _fill(out, torch.cat([got[rank].flatten() for rank in range(self.size)])),
        )

    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op = Op.SUM) -> Work:
        return self._exchange(
            self._pieces(data),
            dict.fromkeys(range(self.size), out),
            lambda got: _fill(out, self._combine(got, op)),
        )

    def all_to_all(self, out: Tensor, data: Tensor) -> Work:
        pieces = self._pieces(data)
        return self._exchange(
            pieces,
            dict.fromkeys(range(self.size), pieces[0]),
            lambda got: _fill(out, torch.cat([got[rank].flatten() for rank in range(self.size)])),
        )

    def scan(self, data: Tensor, op: Op = Op.SUM) -> Work:
        outgoing = [data if rank >= self.rank else None for rank in range(self.size)]
        return self._exchange(
            outgoing,
            dict.fromkeys(range(self.rank + 1), data),
            lambda got: _fill(data, self._combine(got, op)),
        )

    def barrier(self) -> Work:
        token = torch.zeros(1)
        return self._exchange(
            [token] * self.size, dict.fromkeys(range(self.size), token), lambda got: None
        )

    def duplicate(self) -> Group:
        self._duplicates += 1
        return ExchangeGroup(self._transport, self._space * 1024 + self._duplicates)

    def _exchange(
        self,
        outgoing: Sequence[Tensor | None],
        sources: dict[int, Tensor],
        finish: Callable[[dict[int, Tensor]], None],
    ) -> Work:
        """Send outgoing[r] to every rank r; then take a message shaped like sources[r] from r."""
        self._calls += 1
        tag = self._space * _SPACE + _COLLECTIVES + self._calls
        sent = [
            self._transport.send(message.contiguous(), dst, tag)
            for dst, message in enumerate(outgoing)
            if message is not None
        ]

        def receive() -> None:
            got = {src: torch.empty_like(like).contiguous() for src, like in sources.items()}
            for src, into in got.items():
                self._transport.recv(into, src, tag).wait()
            for work in sent:
                work.wait()
            finish(got)

        return PendingWork(receive)

    def _combine(self, got: dict[int, Tensor], op: Op) -> Tensor:
        total = got[0]
        for rank in sorted(got)[1:]:
            op.combine(total, got[rank])
        return total / len(got) if op is Op.MEAN else total

    def _pieces(self, data: Tensor) -> list[Tensor]:
        return list(data.flatten().view(self.size, -1))


def _fill(into: Tensor, data: Tensor) -> None:
    into.copy_(data.view(into.shape))
