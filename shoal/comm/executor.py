"""What carries out the calls of a group: the interface of every executor."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from shoal.comm.call import Call, PeerMessage
from shoal.comm.transport.transport import Work, Works
from shoal.runtime.trace import SentBytes

if TYPE_CHECKING:
    from shoal.comm.executors.hierarchical.topology import Topology

Shortcut = Callable[..., Work]


class Executor(Protocol):
    """Carries out the collectives and messages of ranks 0..size-1.

    All ranks submit the same collectives in the same order. Arguments have been checked by
    `Group`. Executors derive from this class, so that they get the defaults below.
    """

    rank: int
    size: int
    any_source: bool = False  # whether `recv` takes ANY_SOURCE for a source
    # whether an operation beside the computation takes a core from it
    takes_cores: bool = False
    may_share: bool = True  # whether ranks of one host may keep one copy of their weights
    in_order: bool = False  # messages meet in the order of their calls, and one waits for the next
    few_large: bool = False  # whether one long call is faster than as many numbers in short ones
    device: torch.device | None = None  # of all ranks; one GPU of all of them serves their calls
    topology: Topology | None = None  # which ranks share a host, where there are several

    @abstractmethod
    def submit(self, call: Call) -> Work:
        """Start a collective."""

    @abstractmethod
    def send(self, data: Tensor, dst: int, tag: int) -> Work: ...

    @abstractmethod
    def recv(self, into: Tensor, src: int, tag: int) -> Work: ...

    def exchange(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage]) -> Work:
        """Messages of which none waits for another one."""
        works = [self.send(m.data, m.peer, m.tag) for m in sends]
        return Works([*works, *(self.recv(m.data, m.peer, m.tag) for m in receives)])

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Executor | None:
        """An executor of some of the ranks, in that order, with its own order of operations.

        All ranks call it; a rank that is not among them gets None.
        """

    def close(self) -> None:
        """Leave. Operations that have not been waited for are abandoned; safe to call twice."""
        return None

    def describe(self, call: Call) -> str:
        """How a call is carried out, for traces."""
        return f"{call.kind} {call.num_bytes} bytes"

    def bytes_sent(self, call: Call) -> int | None:
        """Bytes that this rank sends, where a named algorithm decides it; otherwise None."""
        return None

    def record_times(self) -> None:
        """From now on note when operations start and end, for traces."""
        return None

    def shortcuts(
        self, all_reduce: Shortcut, broadcast: Shortcut, sent: SentBytes | None
    ) -> dict[str, Shortcut]:
        """Functions that take the place of the group's, for the most common calls.

        They call the group's, which are given, for what the short way cannot do, and add the bytes
        that this rank sends to `sent`, as those do.
        """
        return {}
