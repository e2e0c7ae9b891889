"""Asynchronous decentralized training on several hosts: averages of pairs (AD-PSGD).

After its own update a worker draws a neighbour, and both have the mean of both afterwards. A
thread for each neighbour answers while this worker computes, on a copy of the weights; at the end
of a step the model takes over what has become of the copy.

    rank 2   computes, update, x2 ──▶                             ──▶ (x1 + x2) / 2
    rank 1   computes ............... x1 in its copy ──▶ (x1 + x2) / 2 ............ update

Of a pair the higher rank sends, with its copy locked, and the lower one answers with the mean; a
lower rank that has drawn a higher one asks it to begin. So with a lock in hand a rank waits for
lower ones only: pairs never block each other. What a pair has together does not change.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

from shoal.errors import PeerLost, ShoalError
from shoal.runtime import clock
from shoal.runtime.trace import MIX
from shoal.runtime.waits import waiting
from shoal.schedules.mixing import Mixing
from shoal.server.client.discovery import all_gather_text
from shoal.server.client.route import START_TIMEOUT_S
from shoal.server.protocol import FrameKind, Header, Hello, Refused
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.handshake import dial
from shoal.server.protocol.service import ConnectionService
from shoal.server.shared_memory import bytes_of
from shoal.sync import Replica, Sync
from shoal.sync.gossip_async import NeighbourNews
from shoal.sync.replica_mean import averaged

_DOING = "averaging weights"


class PairwiseGossip(NeighbourNews, Sync):
    """A step sends and receives the parameters once, and once more for each that draws this one.

    The weights that count are the mean of all workers, and so are BatchNorm's statistics. The
    optimizer's state is that of rank 0. A worker that has finished answers until all have.
    """

    synchronous = False
    collects = False

    def __init__(self, replica: Replica, mixing: Mixing, secret: bytes):
        super().__init__(replica)
        config = replica.config
        rank = self.group.rank
        self.rank = rank
        self.gradient_scale = float(self.group.size)
        self.count_news(mixing)
        self._statistics = replica.statistics
        self._copy = self.flat.data.detach().to("cpu", copy=True)  # what pairs average
        self._taken = self._copy.clone()  # what the model has taken over of it
        self._mean = torch.empty_like(self._copy)
        self._copying, self._answering = clock.Lock(), clock.Lock()  # the latter guards `_mean`
        self._changed = clock.Condition()
        shares = np.sum([each[rank] + each[:, rank] for each in mixing.matrices], axis=0)
        self._training: set[int] = set(np.flatnonzero(shares).tolist()) - {rank}
        self._draw = random.Random(f"{config.seed} {rank}")
        self._failure: PeerLost | None = None
        self._links: dict[int, Connection] = {}
        address = f"tcp:{config.hostname or socket.gethostname()}:0"
        self._service = _Answers(secret, [address], config.tls)
        self._service.sync = self
        self._service.start()
        try:
            addresses = all_gather_text(self.group, self._service.listeners[0].address)
            me = Header(FrameKind.HELLO, rank)
            for peer in sorted(self._training):
                with self._reaching(peer):
                    link = dial(addresses[peer], secret, "gossip", me, config.tls, START_TIMEOUT_S)
                link.sock.settimeout(None)
                self._links[peer] = link
            self.group.barrier().wait()  # else one that was asked might not reach who asks
        except BaseException:
            self._end()
            raise

    def spread(self) -> None:
        data = self.flat.data
        with self.update.tracer.span(MIX, "average with a neighbour"):
            with self._copying:
                self._copy.sub_(self._taken.sub_(data.cpu()))  # what this step has changed
            self._average()
            self.steps += 1
            if self.steps >= self.measure_at:
                self.note_distance(self.steps, [2 * float((self._copy - data.cpu()).norm())])
            self._take_over()

    def loss(self, local_loss: Tensor) -> Tensor:
        """Of its own samples."""
        return local_loss * self.group.size

    def after_load(self) -> None:
        self.group.barrier().wait()  # no pair averages any more
        with self._copying:
            self._copy.copy_(self._taken.copy_(self.flat.data))
        self.group.barrier().wait()

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        self.group.barrier().wait()  # all have come as far
        self._take_over()
        with averaged([self.flat.data, *self._statistics], self.group):
            yield

    def close(self) -> None:
        """Neighbours have finished, and ask no more, when it returns."""
        for link in self._links.values():
            with suppress(OSError):
                link.send(Header(FrameKind.LEAVE, self.rank))
        with (
            waiting(
                f"rank {self.rank}",
                lambda: f"ranks {sorted(self._training)}",
                "the end of training",
            ),
            self._changed,
        ):
            self._changed.wait_for(lambda: not self._training or self._failure is not None)
        self._end()

    def _end(self) -> None:
        self._service.close()
        for link in self._links.values():
            link.close()

    def _take_over(self) -> None:
        with self._copying:
            self.flat.data.copy_(self._taken.copy_(self._copy))

    def _average(self) -> None:
        if self._failure is not None:
            raise self._failure
        heard = self.mixing.heard_by(self.rank, self.steps)
        peers = [peer for peer in heard if peer != self.rank]
        [peer] = self._draw.choices(peers, [heard[peer] for peer in peers])
        if peer < self.rank:
            return self._begin(peer)
        with self._reaching(peer):
            self._links[peer].send(Header(FrameKind.AVERAGE, self.rank))
            self._links[peer].receive(0)

    def _begin(self, peer: int) -> None:
        """Average with a lower rank, which answers with the mean."""
        with self._copying, self._reaching(peer):
            self._send(self._links[peer], self._copy)
            self._receive(self._links[peer], self._links[peer].receive(0)[0], self._copy)

    def _send(self, connection: Connection, weights: Tensor) -> None:
        header = Header(FrameKind.AVERAGE, self.rank, sequence=self.steps)
        connection.send(header, b"", bytes_of(weights))
        self.bytes_sent += weights.nbytes

    def _receive(self, connection: Connection, header: Header, into: Tensor) -> None:
        if header.kind is not FrameKind.AVERAGE or header.payload_bytes != into.nbytes:
            raise Refused(f"expected {into.nbytes} bytes of weights, got {header.payload_bytes}")
        connection.read_into(bytes_of(into))
        self.note_read(into.nbytes, self.steps - header.sequence)

    @contextmanager
    def _reaching(self, peer: int) -> Iterator[None]:
        """PeerLost where this neighbour is not reached, or not within the limit of the run."""

        def give_up(seconds: float) -> None:
            if peer in self._links:
                self._links[peer].break_off(TimeoutError(f"no answer in {seconds:.1f} s"))

        try:
            with waiting(f"rank {self.rank}", f"rank {peer}", _DOING, give_up):
                yield
        except (OSError, Refused) as error:
            raise PeerLost(self.rank, peer, f"{_DOING} ({error})") from error

    def answer(self, connection: Connection, peer: int) -> None:
        """In a thread: average with a neighbour whenever it asks, until its connection ends."""
        try:
            while True:
                header, _ = connection.receive(0)
                if header.kind is FrameKind.LEAVE:
                    self._note_end(peer)
                elif header.payload_bytes:
                    self._answer(connection, header)
                else:
                    self._begin(peer)
                    connection.send(Header(FrameKind.OK, self.rank))
        except PeerLost as lost:
            self._note_end(peer, lost)
        except (OSError, ShoalError) as error:
            self._note_end(peer, PeerLost(self.rank, peer, f"{_DOING} ({error})"))

    def _answer(self, connection: Connection, header: Header) -> None:
        with self._answering:
            self._receive(connection, header, self._mean)
            with self._copying:
                self._copy.copy_(self._mean.add_(self._copy).mul_(0.5))
            self._send(connection, self._mean)

    def _note_end(self, peer: int, failure: PeerLost | None = None) -> None:
        """It asks no more; before it has finished that is a failure."""
        with self._changed:
            if peer in self._training:
                self._failure = self._failure or failure
                self._training.discard(peer)
            self._changed.notify_all()


class _Answers(ConnectionService):
    sync: PairwiseGossip

    def serve(self, connection: Connection, hello: Hello, header: Header, number: int) -> None:
        self.sync.answer(connection, header.worker)
