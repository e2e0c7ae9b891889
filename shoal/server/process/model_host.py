"""The models that one server holds, from their first worker to their last."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shoal.errors import BadInput
from shoal.runtime import clock
from shoal.runtime.config import TlsConfig
from shoal.runtime.faults import busy_s
from shoal.runtime.memory_limit import server_threads
from shoal.runtime.trace import OFF, Tracer
from shoal.server.member.operations import EMPTY, OnCommitted, Operation, Payload
from shoal.server.member.place import Elsewhere
from shoal.server.messages import ModelSpec
from shoal.server.model.membership import ModelFailure
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard import DTYPES, partial_sums
from shoal.server.process.log_stream import Follower, Followers
from shoal.server.process.shard_file import ShardSaver
from shoal.server.protocol import Refused
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.endpoint import PLAIN
from shoal.server.rows.copies import RowCopies

if TYPE_CHECKING:
    from shoal.server.member.runtime import ChainRuntime


class Slowness:
    """How much slower this server is; each thread pays for its own work."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._of_thread = threading.local()

    @property
    def is_slow(self) -> bool:
        return self.factor > 1

    def begin(self) -> None:
        if self.is_slow:
            self._of_thread.paid_s = busy_s()

    def applied(self, model: ServedModel) -> None:
        """A decision of the log took effect."""
        self.pay()

    def pay(self) -> None:
        """What was paid before is not paid twice."""
        if not self.is_slow:
            return
        now_s = busy_s()
        paid_s = getattr(self._of_thread, "paid_s", now_s)
        clock.sleep((self.factor - 1) * max(0.0, now_s - paid_s))
        self._of_thread.paid_s = busy_s()


def check_spec(spec: ModelSpec, max_bytes: int) -> None:
    """Refuse a slice that is too large for the server, or whose parameters do not fit into it."""
    if not spec.start <= spec.stop <= spec.size or spec.index >= spec.servers:
        raise Refused(f"slice {spec.start}:{spec.stop} of {spec.size} elements")
    if spec.split.shard >= spec.split.shards:
        raise Refused(f"shard {spec.split.shard} of {spec.split.shards}")
    if spec.split.leader_model is not None and not spec.index:
        raise Refused("server 0 is the leader: it cannot follow another model")
    if spec.norm_from_workers and not spec.rule.is_synchronous:
        raise Refused("workers send the norm of a step only where the rule is synchronous")
    itemsize = DTYPES[spec.dtype].itemsize
    elements = spec.size * (1 + partial_sums(spec)) + 4 * (spec.stop - spec.start)
    if elements * itemsize > max_bytes:
        raise Refused(f"{spec.size} elements are more than this server can hold")
    if spec.microbatches is not None and spec.microbatches % spec.rule.workers:
        raise Refused(f"{spec.microbatches} micro-batches for {spec.rule.workers} workers")
    end = spec.start
    for held in spec.slices:
        stop = held.start + math.prod(held.shape)
        if held.start < end or stop > spec.stop or held.parameter >= spec.parameters:
            raise Refused(f"parameter {held.parameter} is not inside of this slice")
        end = stop


MAX_MODELS = 64
MAX_RELEASED = 4096  # models that are remembered for workers that come back too late


@dataclass(eq=False, repr=False)
class ModelHost:
    """Models by their number, which the workers of a model agree on.

    `has_exited(rank)` tells whether a worker that has not joined never will. `report` returns
    counts of the whole server. A process that only serves says how many threads it may use.
    """

    secret: bytes
    max_bytes: int
    report: Callable[[], dict[str, Any]]
    has_exited: Callable[[int], bool] | None = None
    tls: TlsConfig = PLAIN
    most_threads: int | None = None
    takes_back = False  # lost workers are started again
    chain: ChainRuntime | None = None  # of a replicated server
    keeps_payloads = False  # a copy that comes back is taught from the log
    saver: ShardSaver | None = None  # writes checkpoints
    device: torch.device | None = None  # where weights and optimizers are; None: the CPU

    def __post_init__(self) -> None:
        self.slowness = Slowness()
        self.tracer: Tracer = OFF
        self.models: dict[int, ServedModel] = {}
        self.changed = clock.Condition()
        self._being_made: set[int] = set()
        self._released: deque[int] = deque(maxlen=MAX_RELEASED)
        self._following: list[Follower] = []
        self._copies: dict[int, RowCopies] = {}  # of models with hot rows

    @property
    def in_chain(self) -> bool:
        return self.chain is not None

    @property
    def may_lose(self) -> bool:
        """What was acknowledged: eventual consistency."""
        return self.chain is not None and self.chain.is_eventual

    def execute(
        self,
        operation: Operation,
        payload: Payload = EMPTY,
        on_committed: OnCommitted | None = None,
    ) -> Any:
        """Let an operation take effect; a chain calls `on_committed` with the answer before."""
        if self.chain is None:
            return operation.apply(self, payload)
        return self.chain.execute(operation, payload, on_committed)

    @property
    def connections(self) -> list[Connection]:
        """To the leaders of models that are followed here."""
        found = [follower.connection for follower in self._following]
        return [connection for connection in found if connection is not None]

    def model(self, number: int) -> ServedModel:
        model = self.models.get(number)
        if model is None:
            raise Refused(f"this server does not hold model {number}")
        return model

    def hold(self, model_id: int, spec: ModelSpec) -> ServedModel:
        """The model; it is made when its first worker joins. Called by every connection."""
        with self.changed:
            self.changed.wait_for(lambda: model_id not in self._being_made)
            model = self.models.get(model_id)
            if model is None:
                if len(self.models) + len(self._being_made) >= MAX_MODELS:
                    raise Refused(f"this server holds {MAX_MODELS} models already")
                check_spec(spec, self.max_bytes)
                self._being_made.add(model_id)
            elif model.spec != spec:
                raise Refused("the workers of one model describe it differently")
        if model is None:
            try:
                model = self._make(model_id, spec)
            finally:
                with self.changed:
                    self._being_made.discard(model_id)
                    self.changed.notify_all()
        if self.most_threads is not None:
            num_bytes = model.state.shard.data.nbytes
            torch.set_num_threads(server_threads(num_bytes, self.most_threads))
        return model

    def _make(self, model_id: int, spec: ModelSpec) -> ServedModel:
        """Without the lock: the leader may be this server, with another shard of the replica."""
        is_leader = spec.index == 0
        try:
            model = ServedModel(spec, is_leader, self.in_chain, self.device)
        except (BadInput, RuntimeError) as error:
            raise Refused(str(error)) from error
        model.log.on_save = partial(self._save, model_id, model)
        model.state.on_applied = partial(self.slowness.applied, model)
        model.state.tracer = self.tracer
        model.log.may_lose = self.may_lose
        model.log.shared = 0 if self.in_chain and spec.servers > 1 else None
        has_exited = self.has_exited
        if has_exited is not None:
            model.membership.has_exited = lambda worker: has_exited(spec.split.rank(worker))
        if self.chain is not None:
            model.membership.on_loss = partial(self.chain.note_loss, model_id)
        follows = not is_leader and not self.in_chain
        if follows:
            follower = Follower(model, model_id, self.secret, self.tls, model.replay)
        with self.changed:
            if follows:
                self._following.append(follower)
            elif is_leader and spec.servers > 1:
                Followers(model)  # of its log
            self.models[model_id] = model
        return model

    def _save(self, model_id: int, model: ServedModel, number: int) -> None:
        chain = self.chain

        def stays() -> bool:
            """Waits until all that is applied is committed; False if this copy was removed."""
            if chain is None:
                return True
            try:
                chain.await_committed()
            except (Elsewhere, ModelFailure):
                return False
            return self.models.get(model_id) is model

        is_copy = chain is not None and not chain.node.is_head  # the head writes for all
        if self.saver is not None and not is_copy:
            self.saver.save(model_id, model, number, stays)

    def release(self, model_id: int) -> None:
        """Forget a model whose workers have all departed."""
        with self.changed:
            model = self.models.get(model_id)
            if model is None or self.in_chain:
                return
            membership = model.membership
            # not while workers that were lost may come back, even if all of them were
            if not (membership.is_finished if self.takes_back else membership.is_over):
                return
            # those that joined last often end last
            if any(member.channels for member in reversed(membership.members.values())):
                return
            del self.models[model_id]
            self._released.append(model_id)
            copies = self._copies.pop(model_id, None)
            self.changed.notify_all()
        model.log.followers.close()
        if copies is not None:
            copies.close()

    def is_released(self, model_id: int) -> bool:
        """Whether all workers of this model have departed before."""
        with self.changed:
            return model_id in self._released and model_id not in self.models

    def followers(self, model_id: int) -> Followers:
        followers = self.model(model_id).log.followers
        if not isinstance(followers, Followers):
            raise Refused("this server does not lead that model")
        return followers

    def clear(self, reason: str) -> None:
        """Give up all models; waits for them end."""
        with self.changed:
            models = list(self.models.values())
            self.models.clear()
            self.changed.notify_all()
        for model in models:
            model.fail(reason)
            model.log.followers.close()

    def row_copies(self, model_id: int) -> RowCopies:
        with self.changed:
            model = self.model(model_id)
            if model_id not in self._copies:
                self._copies[model_id] = RowCopies(model, model_id, self.secret, self.tls)
            return self._copies[model_id]

    def close(self, join_s: float) -> None:
        for model in list(self.models.values()):
            model.fail("the server was stopped", is_loss=True)
            model.log.followers.close()
        for copies in list(self._copies.values()):
            copies.close()
        for follower in self._following:
            follower.close()
        for follower in self._following:
            follower.join(join_s)
        if self.saver is not None:
            self.saver.close()
