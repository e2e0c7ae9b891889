"""Notices that another rank is lost or hangs, which a call of NCCL would wait for without end.

A rank that computes with the others has called NCCL and waits for its GPU: no exception reaches it
there. So each has a thread that hears the others in the host's memory, or over TCP between hosts:

    .            goodbye: I have finished; one that goes without it was lost
    ! 2 why      rank 2 is lost, or has failed, and so I leave
    ? where      my call takes long: where are you?
    = where      there

The connections of NCCL break before a process has ended, and a rank that fails for that reason
leaves, too: so each looks for one that was killed, before it names one that has left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from shoal.comm.executor import Executor
from shoal.comm.executors.nccl import NcclCalls
from shoal.comm.transport.shm.segment import Segment
from shoal.errors import PeerLost, ShoalError
from shoal.runtime import clock
from shoal.runtime.waits import LongWait, Periodic, add_source
from shoal.runtime.wording import listed

_PERIOD_S = 0.5
_LOOKS = 3  # for a rank that was killed, where one has left
_LONG_S = 3.0  # a call; then this rank asks the others
_SILENT_S = 2.0  # without an answer
_MESSAGE_BYTES = 256


class NcclWatch(Periodic):
    """All ranks make one, with the executor of the host's way among them.

    `end` is called once, in its thread. With `finds_killed` it looks for a rank that was killed,
    where one has left; with `kills_stopped` it kills one that is stopped at the limit.
    """

    def __init__(
        self,
        host: Executor,
        calls: NcclCalls,
        end: Callable[[PeerLost], None],
        limit_s: float,
        finds_killed: bool = True,
        kills_stopped: bool = True,
    ):
        super().__init__("shoal-nccl", _PERIOD_S, self._look)
        own: Any = host.split(range(host.size))
        self.rank = host.rank
        self._whole: Any = host  # SharedMemory or Hierarchical
        self._host = own
        self._calls = calls
        self._end = end
        self._limit_s = limit_s
        self._kills_stopped = kills_stopped
        self._looks_needed = _LOOKS if finds_killed else 1
        self._looks = 0
        self._has_ended = False
        self._messages: dict[int, tuple[torch.Tensor, Any]] = {}
        for peer in range(host.size):
            if peer != host.rank:
                self._receive(peer)
        self._lost: dict[int, PeerLost] = {}
        self._where: dict[int, str] = {}  # of a rank that has answered
        self._asked_ns: dict[int, int] = {}  # of one that has not
        add_source(self.current_wait)

    def __exit__(self, *error: object) -> None:
        self.close()
        why = error[1]
        if isinstance(why, PeerLost) and why.peer is None:  # as NCCL says it
            for _ in range(_LOOKS):
                if self._has_lost():
                    break
                clock.sleep(_PERIOD_S)
        if why is None:
            self.say_goodbye()
        elif not isinstance(why, PeerLost):
            self._tell(f"!{self.rank} {type(why).__name__}: {why}")
        self.leave()

    def say_goodbye(self) -> None:
        self._tell(".")

    def leave(self) -> None:
        self.close()
        self._host.close()

    # ------------------------------------------------------------------ waits

    def current_wait(self) -> LongWait | None:
        """For ranks that are stopped, silent or elsewhere; a GPU may compute for long."""
        unfinished = self._calls.unfinished()
        if unfinished is None:
            return None
        absent, is_certain = self._absent()
        if not absent:
            return None
        whom = " and ".join(f"rank {peer} ({self._place(peer)})" for peer in absent)
        me = f"rank {self.rank}"
        return LongWait(me, whom, unfinished.doing, unfinished.start_ns, is_certain)

    def _absent(self) -> tuple[list[int], bool]:
        """Ranks that others wait for, and whether they do not even answer."""
        now_ns = clock.monotonic_ns()
        silent = [p for p in self._messages if self._is_stopped(p) or self._is_silent(p, now_ns)]
        if silent:
            return silent, True
        return [p for p, where in self._where.items() if not where.startswith("in ")], False

    def _is_stopped(self, peer: int) -> bool:
        segment = self._segment_of(peer)
        return segment is not None and segment[0].is_stopped(segment[1])

    def _is_silent(self, peer: int, now_ns: int) -> bool:
        asked_ns = self._asked_ns.get(peer)
        return asked_ns is not None and now_ns - asked_ns > _SILENT_S * 1e9

    def _place(self, peer: int) -> str:
        """Where a rank is, as it says, or as the kernel does."""
        segment = self._segment_of(peer)
        if segment is not None and segment[0].is_stopped(segment[1]):
            return segment[0].process(segment[1])
        return "no answer" if peer in self._asked_ns else self._where.get(peer, "not asked")

    def _places(self) -> str:
        ranks: dict[str, list[int]] = defaultdict(list)
        for peer in self._messages:
            ranks[self._place(peer)].append(peer)
        return "; ".join(f"{listed('rank', some)}: {place}" for place, some in ranks.items())

    def _segment_of(self, peer: int) -> tuple[Segment, int] | None:
        """The memory of this host in which a rank is, and its number there."""
        topology = self._whole.topology
        if topology is None:
            return self._whole.segment, peer
        if peer not in topology.local:
            return None
        return self._whole.shared_memory.segment, topology.local.index(peer)

    # ------------------------------------------------------------------ the thread

    def _look(self) -> None:
        if self._has_lost():
            return
        unfinished = self._calls.unfinished()
        if unfinished is None:
            self._asked_ns.clear()
            self._where.clear()
            return
        now_ns = clock.monotonic_ns()
        seconds = (now_ns - unfinished.start_ns) / 1e9
        if seconds >= self._limit_s:
            self._give_up(unfinished.doing)
        elif seconds >= _LONG_S:
            self._ask(unfinished.doing, seconds, now_ns)

    def _ask(self, doing: str, seconds: float, now_ns: int) -> None:
        """Those that have answered before, or were not asked: what is silent gets no more."""
        asked = [peer for peer in self._messages if peer not in self._asked_ns]
        self._asked_ns.update(dict.fromkeys(asked, now_ns))
        self._tell(f"?in {doing} for {seconds:.0f} s", asked)

    def _give_up(self, doing: str) -> None:
        absent, _ = self._absent()
        peer = absent[0] if len(absent) == 1 else None
        lost = PeerLost(self.rank, peer, f"{doing} ({self._places()})", self._limit_s)
        for peer in filter(self._is_stopped, self._messages if self._kills_stopped else ()):
            segment = self._segment_of(peer)
            if segment is not None:  # it would not end by itself, and keep its GPU
                segment[0].kill(segment[1])
        self._finish(lost)

    def _has_lost(self) -> bool:
        """Whether a rank was lost, after `end` was called for it."""
        if self._has_ended:
            return True
        for peer in list(self._messages):
            try:
                self._hear(peer)
            except PeerLost:
                del self._messages[peer]
                self._lost.setdefault(peer, self._loss_of(peer, ""))
        killed = [one for one in self._lost.values() if (one.exit_status or 0) < 0]
        self._looks += bool(self._lost)
        if not killed and (not self._lost or self._looks < self._looks_needed):
            return False
        self._finish((killed or list(self._lost.values()))[0])
        return True

    def _loss_of(self, peer: int, why: str) -> PeerLost:
        segment = self._segment_of(peer)
        if why or segment is None:
            reason = f" ({why})" if why else ""
            return PeerLost(self.rank, peer, f"{self._calls.latest}{reason}")
        lost = segment[0].lost(segment[1], self._calls.latest)
        return PeerLost(self.rank, peer, lost.doing, lost.after_s, lost.exit_status)

    def _finish(self, lost: PeerLost) -> None:
        self._has_ended = True
        if lost.peer is not None:
            self._tell(f"!{lost.peer}")
        self._end(lost)

    # ------------------------------------------------------------------ messages

    def _receive(self, peer: int) -> None:
        into = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        self._messages[peer] = into, self._host.recv(into, peer, 0)

    def _hear(self, peer: int) -> None:
        """What a rank has said; PeerLost where it is gone."""
        while peer in self._messages:
            into, message = self._messages[peer]
            if not message.poll():
                if message.is_lost():
                    raise PeerLost(self.rank, peer, self._calls.latest)
                return
            message.wait()
            text = into.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
            kind = text[:1]
            said = text[1:]
            if kind == ".":
                del self._messages[peer]
                return
            self._receive(peer)
            if kind == "!":
                self._take_notice(peer, said)
                continue
            self._where[peer] = said
            self._asked_ns.pop(peer, None)
            if kind == "?":
                unfinished = self._calls.unfinished()
                doing = self._calls.latest if unfinished is None else unfinished.doing
                state = "has called nothing since" if unfinished is None else "in"
                self._tell(f"={state} {doing}", [peer])

    def _take_notice(self, peer: int, said: str) -> None:
        """A rank leaves, and names the one because of which it does."""
        number, _, why = said.partition(" ")
        if number.isascii() and number.isdigit() and len(number) < 10:
            lost = int(number)
            is_rank = lost < self._host.size and lost != self.rank
            if is_rank and (why or self._segment_of(lost) is None):
                self._lost[lost] = self._loss_of(lost, why or f"as rank {peer} has noticed")
                self._looks = _LOOKS

    def _tell(self, text: str, peers: list[int] | None = None) -> None:
        data = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        words = text.encode()[:_MESSAGE_BYTES]
        data[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        for peer in list(self._messages) if peers is None else peers:
            with suppress(ShoalError):
                self._host.send(data, peer, 0)
