"""What one worker pushes to and pulls from all servers of one model.

Requests of one channel are carried out in order, beside the computation (`link.py`). The
first server is the leader: it decides about every push, after all other servers have received it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from shoal.comm.transport import cuda_ipc
from shoal.errors import RunOver
from shoal.runtime import clock
from shoal.runtime.config import RunConfig
from shoal.runtime.trace import OFF, Tracer
from shoal.server import shared_memory as shared
from shoal.server.client.chain_route import ChainRoute
from shoal.server.client.link import PostedRequest, ServerLink
from shoal.server.client.route import Caller, Request, Route
from shoal.server.messages import (
    Ack,
    BarrierRequest,
    Commit,
    DeviceAsked,
    DeviceOffered,
    Entered,
    LowestSurvivor,
    ModelSpec,
    Norms,
    Pull,
    Pulled,
    Scalar,
    ShardState,
    Stats,
    WireMessage,
)
from shoal.server.model.shard import DTYPES, partial_sums
from shoal.server.model.shard_state import read_tensors
from shoal.server.protocol import FrameKind, Header, decode, encode, new_incarnation
from shoal.server.shared_memory import WorkerSegment, bytes_of


class DeviceExchange:
    """`out` and `inbox` are as those of a client, and on the GPU."""

    def __init__(
        self, specs: Sequence[ModelSpec], segments: Sequence[WorkerSegment], device: torch.device
    ):
        self._specs = specs
        self._segments = segments
        self._stream_of = device
        size = specs[0].size
        first = segments[0]
        self.out = first.out.new_zeros(len(first.out), size)
        self.inbox = first.inbox.new_zeros(size)

    def push(self, elements: slice) -> None:
        """Copy these elements of `out` to the servers that hold them."""
        for segment, spec in zip(self._segments, self._specs, strict=True):
            start = max(elements.start, spec.start)
            stop = min(elements.stop, spec.stop)
            if start < stop:
                held = slice(start - spec.start, stop - spec.start)
                segment.out[:, held].copy_(self.out[:, start:stop])

    def take(self) -> None:
        """Copy what the servers have written to `inbox`; they may then write again."""
        for segment, spec in zip(self._segments, self._specs, strict=True):
            self.inbox[spec.start : spec.stop].copy_(segment.inbox)
        self.synchronize()

    def synchronize(self) -> None:
        """Return when the copies have been made: servers know nothing of this process's stream."""
        torch.cuda.current_stream(self._stream_of).synchronize()


@dataclass(frozen=True)
class PullResult:
    """What a pull has brought; the weights, or sums, are in the client's `inbox`."""

    version: int
    slowest: int | None  # clocks of the slowest and the fastest live worker
    fastest: int | None
    loss_flags: Tensor


class PendingPull(NamedTuple):
    """A pull that is under way on all servers."""

    replies: Sequence[PostedRequest]
    loss_flags: Tensor
    on_device: DeviceExchange | None

    def wait(self) -> PullResult:
        """The leader's answer, when all servers have answered."""
        leader, *_ = [decode(reply.result().meta, Pulled) for reply in self.replies]
        if self.on_device is not None:
            self.on_device.take()
        return PullResult(leader.version, leader.slowest, leader.fastest, self.loss_flags)


class Client:
    """All servers of one model, from one worker. `specs` has one entry per server.

    A server with copies has several addresses.
    """

    def __init__(
        self,
        rank: int,
        model: int,
        addresses: Sequence[str | Sequence[str]],
        secret: bytes,
        specs: Sequence[ModelSpec],
        config: RunConfig | None = None,
        tracer: Tracer = OFF,
    ):
        config = config or RunConfig()
        first = specs[0]
        self.rank = rank
        self.model = model
        self.specs = list(specs)
        self.tracer = tracer
        self.dtype = DTYPES[first.dtype]
        self.size = first.size
        self.lowest_survivor = 0  # the lowest surviving worker, as of the latest barrier
        self.sequence = 0
        self.shared_bytes = 0  # written to shared memory for servers to read
        self.links: list[ServerLink] = []
        self.on_device: DeviceExchange | None = None  # where a GPU has the pushes and pulls
        self._loss_flags_dtype = DTYPES[first.loss_flags_dtype]
        self._barriers = 0
        self._generations: tuple[int, ...] | None = None  # of the workers at a meeting
        self.comes_back = False  # the servers had lost this worker: it has to enter
        self._settling: list[PostedRequest] = []
        descriptor = None
        header = Header(FrameKind.HELLO, rank, model, new_incarnation(config.incarnation))
        caller = Caller(secret, header, first.split.rank, config)
        try:
            for index, address in enumerate(addresses):
                if isinstance(address, str):
                    route = Route(caller, index, address)
                else:
                    route = ChainRoute(caller, index, address)
                self.links.append(ServerLink(route, tracer))
            made = None
            sums = partial_sums(first)
            if any(link.route.is_unix for link in self.links):
                made = shared.make(self.dtype, self.size, sums)
            if made is not None:
                memory, descriptor = made
                self.out = memory.out
                self.inbox = memory.inbox
            else:
                self.out = torch.zeros(sums, self.size, dtype=self.dtype)
                self.inbox = torch.zeros(self.size, dtype=self.dtype)
            for link, spec in zip(self.links, self.specs, strict=True):
                set_up = link.join(encode(spec), descriptor)
                if set_up.is_over:
                    raise RunOver(self.rank)
                self.comes_back |= set_up.comes_back
        except BaseException:
            self.close()
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @property
    def shared_memory(self) -> str | None:
        """Where pushes and pulls are, in words; None: they travel over connections."""
        if self.on_device is not None:
            return "memory of the GPU"
        return "shared memory" if self.shares_memory else None

    @property
    def shares_memory(self) -> bool:
        """Whether only small messages travel over connections."""
        return all(link.has_inbox for link in self.links)

    def share_weights(self, tell: shared.Tell) -> bool:
        """Keep the weights of all servers in memory that all workers map. A collective call.

        From then on `inbox` is that memory, and a pull copies nothing.
        """
        num_bytes = self.size * self.dtype.itemsize if self.shares_memory else None
        descriptor = shared.share(tell, self.rank, num_bytes)
        if descriptor is None:
            return False
        try:
            self.inbox = shared.attach_weights(descriptor, self.dtype, self.size)
            for link in self.links:
                request = Request(FrameKind.SHARE_WEIGHTS, descriptor=descriptor)
                link.call("control", request)
        finally:
            os.close(descriptor)
        return True

    def share_device(self, device: torch.device) -> None:
        """Push and pull in memory on this GPU, if it is that of all servers and can be shared."""
        asked = DeviceAsked(cuda_ipc.device_name(device), shared.this_process())
        segments = []
        for link, spec in zip(self.links, self.specs, strict=True):
            offered = decode(self.request(link, FrameKind.SHARE_DEVICE, asked), DeviceOffered)
            segment = shared.open_offer(offered, spec, device)
            if segment is None:
                return
            segments.append(segment)
        for link in self.links:
            self.request(link, FrameKind.SHARE_DEVICE, DeviceAsked(is_accepted=True))
        self.on_device = DeviceExchange(self.specs, segments, device)
        self.out = self.on_device.out
        self.inbox = self.on_device.inbox

    # ------------------------------------------------------------------ pushing

    def push(self, elements: slice, held: Tensor | None = None) -> None:
        """These elements of `out` are final, or are `held` elsewhere: send them to their servers.

        What is held elsewhere is not changed before the push is acknowledged.
        """
        if self.on_device is not None:
            self.on_device.push(elements)
        for link, spec in zip(self.links, self.specs, strict=True):
            start = max(elements.start, spec.start)
            stop = min(elements.stop, spec.stop)
            if start >= stop:
                continue
            if link.shares_memory:
                num_bytes = (stop - start) * self.out.element_size()
                self.shared_bytes += num_bytes
                if self.tracer.enabled:
                    now_ns = clock.monotonic_ns()
                    server = link.route.server("push")
                    self.tracer.add(
                        "push",
                        now_ns,
                        now_ns,
                        f"push {server}",
                        "shared memory",
                        None,
                        num_bytes,
                        server,
                    )
            else:
                final = self.out[:, elements] if held is None else held.reshape(1, -1)
                for index, gradients in enumerate(final[:, start - elements.start :]):
                    offset = index * (spec.stop - spec.start) + start - spec.start
                    request = Request(
                        FrameKind.BUCKET,
                        payload=(bytes_of(gradients[: stop - start]),),
                        sequence=self.sequence + 1,
                        argument=offset * self.dtype.itemsize,  # in the server's memory
                        is_answered=False,
                    )
                    link.post("push", request)

    def commit(
        self, commit: Commit, loss_flags: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Ack:
        """The push is complete: stage it with all followers, then let the leader decide."""
        self.stage(commit, loss_flags)
        return self.decide(commit, loss_flags, meanwhile)

    def stage(self, commit: Commit, loss_flags: Tensor) -> None:
        """The push is complete: all followers have it when this returns."""
        if self.on_device is not None:
            self.on_device.synchronize()
        self.sequence += 1
        staged = [self._post_commit(link, commit, loss_flags) for link in self._followers]
        for reply in staged:
            reply.result()

    def decide(
        self, commit: Commit, loss_flags: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Ack:
        """The leader's decision about the push that was staged.

        `meanwhile` runs before the leader has answered, and may give it what it needs.
        """
        decision = self._post_commit(self.links[0], commit, loss_flags)
        if meanwhile is not None:
            meanwhile()
        return decode(decision.result().meta, Ack)

    @property
    def _followers(self) -> list[ServerLink]:
        """All but the leader, which may be that of another shard."""
        return self.links[1:] if self.specs[0].index == 0 else self.links

    def settle(self, position: int) -> None:
        """Ask followers to answer when they have applied the log up to `position`."""
        request = Request(FrameKind.SETTLE, sequence=self.sequence, argument=position)
        self._settling = [link.post("push", request) for link in self._followers]

    def wait_settled(self) -> None:
        """Return when no server reads the latest push any more."""
        for reply in self._settling:
            reply.result()
        self._settling = []

    def norms(self) -> dict[int, float]:
        """The norm of each parameter's gradient in the current step, by parameter index."""
        values = decode(self.request(self.links[0], FrameKind.NORMS), Norms).values
        parameters = [rows.parameter for spec in self.specs for rows in spec.slices]
        norms: dict[int, float] = {}
        for parameter, norm in zip(parameters, values, strict=True):
            norms[parameter] = math.hypot(norms[parameter], norm) if parameter in norms else norm
        return norms

    def set_norm(self, value: float) -> None:
        """The norm of the gradient over all shards of the replica."""
        request = Request(FrameKind.TOTAL_NORM, encode(Scalar(value)), sequence=self.sequence)
        self.links[0].call("control", request)

    # ------------------------------------------------------------------ pulling

    def pull(self, step: int | None, version: int) -> PendingPull:
        """Ask all servers at once for weights that are at least as new as `version`."""
        meta = encode(Pull(step, version))
        headers = [
            torch.empty(1 + spec.parameters, dtype=self._loss_flags_dtype) for spec in self.specs
        ]
        replies = []
        for link, spec, header in zip(self.links, self.specs, headers, strict=True):
            into = [bytes_of(header)]
            if not link.has_inbox:
                into.append(bytes_of(self.inbox[spec.start : spec.stop]))
            replies.append(link.post("pull", Request(FrameKind.PULL, meta, into=tuple(into))))
        return PendingPull(replies, headers[0], self.on_device)

    def get_state(self) -> list[tuple[ShardState, list[Tensor]]]:
        """The optimizer state of every server."""
        request = Request(FrameKind.STATE_GET, into=None)
        replies = [link.post("pull", request) for link in self.links]
        found = []
        for meta, payload in (reply.result() for reply in replies):
            state = decode(meta, ShardState)
            flat = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0)
            found.append((state, read_tensors(state, flat)))
        return found

    def set_state(self, states: Sequence[tuple[ShardState, list[Tensor]]], weights: Tensor) -> None:
        """Give every server its weights and its shard of the optimizer state; the leader last.

        So a worker that comes back, and finds weights at the leader, finds them everywhere.
        """
        shards = list(zip(self.links, self.specs, states, strict=True))
        for some in (shards[1:], shards[:1]):
            replies = []
            for link, spec, (state, tensors) in some:
                payload = tuple(map(bytes_of, [weights[spec.start : spec.stop], *tensors]))
                request = Request(FrameKind.STATE_SET, encode(state), payload)
                replies.append(link.post("pull", request))
            for reply in replies:
                reply.result()

    # ------------------------------------------------------------------ membership

    def enter(self) -> Entered:
        """Take the place of a process that was lost, at the present step."""
        entered = decode(self.request(self.links[0], FrameKind.ENTER), Entered)
        if entered.is_over:
            raise RunOver(self.rank)
        self.comes_back = False
        return entered

    def meet(self, number: int, generations: Sequence[int]) -> None:
        """The next barriers have numbers above this one, and are of these workers alone."""
        self._barriers = number
        self._generations = tuple(generations)

    def barrier(self) -> None:
        """Wait for all live workers. All of them then know the same `lowest_survivor`."""
        self._barriers += 1
        request = BarrierRequest(self._barriers, self._generations)
        answer = self.request(self.links[0], FrameKind.BARRIER, request)
        self.lowest_survivor = decode(answer, LowestSurvivor).worker

    def stats(self, final: bool = False) -> list[dict[str, Any]]:
        """The counters of every server; with `final`, when all workers have left.

        Those of the other copies are under "replicas", as far as they answer.
        """
        found = []
        for link in self.links:
            counts = msgspec.msgpack.decode(self.request(link, FrameKind.STATS, Stats(final)))
            if final and link.has_copies:
                others = [msgspec.msgpack.decode(m) for m in link.route.other_stats()]
                counts["replicas"] = others
                counts["is_complete"] &= len(others) + 1 == link.route.copies
            found.append(counts)
        return found

    def leave(self) -> None:
        for link in reversed(self.links):  # the leader last: it decides until then
            answer = self.request(link, FrameKind.LEAVE)
            self.lowest_survivor = decode(answer, LowestSurvivor).worker

    def request(
        self, link: ServerLink, kind: FrameKind, message: WireMessage | None = None
    ) -> bytes:
        """Send a control message and return the metadata of its answer."""
        meta = b"" if message is None else encode(message)
        return link.call("control", Request(kind, meta)).meta

    def close(self) -> None:
        for link in self.links:
            link.close()

    def _post_commit(self, link: ServerLink, commit: Commit, loss_flags: Tensor) -> PostedRequest:
        whole = msgspec.structs.replace(commit, pushed_bytes=link.pushed_bytes)
        link.pushed_bytes = 0
        payload = (bytes_of(loss_flags),)
        request = Request(
            FrameKind.COMMIT, encode(whole), payload, sequence=self.sequence, argument=commit.step
        )
        return link.post("push", request)
