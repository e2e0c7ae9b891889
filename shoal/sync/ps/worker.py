"""What all consistency rules share on the worker's side: push, pull, and the state of servers.

    begin    the weights that the rule allows have arrived
    reduce   a bucket is in the memory shared with the servers, or is sent to them
    finish   the push is complete: commit it, and pull

    ps                  synchronous: the result of one device
    ps(staleness=0)     the same
    ps(quorum=q)        the mean over the workers that pushed in time
    ps(staleness=k)     each push is applied at once; bounded staleness
    ps(mode="async")    the same without a bound

`server/consistency.py` decides which pushes count. `plan.py` chooses the class, of those in
`consistency.py`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.runtime.checkpoint_folders import WORKER_FILE, version_of
from shoal.runtime.config import ServerCheckpointConfig
from shoal.runtime.trace import WAIT
from shoal.server.client.client import Client, PullResult
from shoal.server.client.discovery import ServerSet
from shoal.server.consistency import Rule
from shoal.server.messages import Ack, Commit, ModelSpec, ParameterSlice, ShardState, StateTensor
from shoal.server.model.named_optimizer import Option, options_of
from shoal.server.model.shard import NAMES
from shoal.server.process.shard_file import PartWriter, write_tensors
from shoal.server.rows.client import RowRules, ServerStore
from shoal.sync import Comeback, Replica, Sync
from shoal.sync.lasting import KeptStatistics
from shoal.sync.memory import tensors_of_server
from shoal.sync.ps.push import GradientPush, UpdateOnServers
from shoal.sync.ps.summary import counts_of_shards, load_sentences, summarize, table_loads

if TYPE_CHECKING:
    from shoal.server.client.client import PendingPull
    from shoal.sync.ps.consistency import SharedLeader, SharedPull

    Leader: TypeAlias = Client | SharedLeader  # the server that decides
    Pending: TypeAlias = PendingPull | SharedPull  # a pull that is under way


_PATIENCE = 4  # times `every` steps, for a checkpoint that is being written


class ServerSaves:
    """Checkpoints that one worker asks the servers of one model for."""

    def __init__(self, config: ServerCheckpointConfig, model: int, rank: int):
        assert config.folder is not None
        self.folder = config.folder
        self.model = model
        self.accepted: int | None = None  # this worker writes the part of the workers of it
        self._every = config.every
        self._latest = 0  # that was asked for
        self._writer = PartWriter(f"worker {rank}", self.folder)

    def may_ask(self, number: int) -> bool:
        """Whether a worker may ask for a checkpoint of step `number`, this one or another."""
        return number % self._every == 0

    def due(self, number: int) -> int | None:
        """The checkpoint to ask for with the push that completes step `number`."""
        if not self.may_ask(number):
            return None
        is_awaited = self._latest > number - _PATIENCE * self._every
        latest = version_of(self.folder, self._latest, self.model)
        is_written = latest.path.exists() and not latest.is_complete
        if self._latest and is_awaited and (self._writer.is_busy or is_written):
            return None  # the disk is slower than training: this one is left out
        self._latest = number
        return number

    def write(self, number: int, describe: Callable[[], tuple[dict[str, Tensor], Any]]) -> None:
        """Write the part of the workers in the background: what `describe()` returns now."""
        if self._writer.is_busy:
            return
        tensors, document = describe()
        version = version_of(self.folder, number, self.model)

        self._writer.start(
            lambda: version.write(WORKER_FILE, lambda file: write_tensors(file, tensors, document))
        )

    def take_accepted(self) -> int | None:
        accepted = self.accepted
        self.accepted = None
        return accepted

    def close(self) -> None:
        self._writer.close()


StateAndTensors = tuple[ShardState, list[Tensor]]


def shard_state(
    optimizer: torch.optim.Optimizer | None,
    params: Sequence[nn.Parameter],
    spec: ModelSpec,
    steps: int,
) -> StateAndTensors:
    """The state that one server holds; of a tensor that is split by rows, these rows."""
    values = []
    tensors = []
    numbers = []
    for index, rows in enumerate(spec.slices):
        p = params[rows.parameter]
        for key, value in (optimizer.state.get(p, {}) if optimizer else {}).items():
            if isinstance(value, Tensor):
                held = rows_of(value, rows) if value.shape == p.shape else value
                tensor = held.detach().cpu().contiguous()
                dtype = NAMES[tensor.dtype]
                values.append(StateTensor(index, key, dtype, tuple(tensor.shape)))
                tensors.append(tensor)
            elif value is None or isinstance(value, (bool, int, float)):
                numbers.append((index, key, value))
    return ShardState(steps, tuple(values), tuple(numbers), options=_options(optimizer)), tensors


def join_state(
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    specs: Sequence[ModelSpec],
    states: Sequence[StateAndTensors],
) -> None:
    """Fill the optimizer of a worker with the state of all servers."""
    optimizer.state.clear()
    for spec, (state, tensors) in zip(specs, states, strict=True):
        for value, tensor in zip(state.tensors, tensors, strict=True):
            rows = spec.slices[value.slice]
            p = params[rows.parameter]
            put_rows(optimizer.state[p], value.key, tensor, rows, tuple(p.shape))
        for index, key, number in state.numbers:
            optimizer.state[params[spec.slices[index].parameter]][key] = number


def rows_of(tensor: Tensor, held: ParameterSlice) -> Tensor:
    """What a server holds, of a tensor like the whole parameter."""
    if tuple(tensor.shape) == held.shape:
        return tensor
    return tensor[held.first_row : held.first_row + held.shape[0]]


def put_rows(
    into: dict[str, Any], key: str, tensor: Tensor, held: ParameterSlice, shape: tuple[int, ...]
) -> None:
    """What a server holds of a tensor of a parameter of this shape; or all, of other tensors."""
    if held.shape == shape or tuple(tensor.shape) != held.shape:
        into[key] = tensor
        return
    if key not in into:
        into[key] = torch.zeros(shape, dtype=tensor.dtype)
    rows_of(into[key], held).copy_(tensor)


def _options(optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Option], ...]:
    """The numbers of each parameter group, which a checkpoint may have changed."""
    if optimizer is None:
        return ()
    return tuple(
        {
            key: value
            for key, value in options_of(optimizer, group).items()
            if isinstance(value, (int, float, tuple)) and not isinstance(value, bool)
        }
        for group in optimizer.param_groups
    )


T = TypeVar("T")


@dataclass(frozen=True)
class PsContext:
    """What the worker's side of a parameter server works with."""

    replica: Replica  # its `group`: workers that hold the same shard, one of each replica
    client: Client
    servers: ServerSet
    rule: Rule
    statistics: KeptStatistics | None = None  # of BatchNorm, for workers that come back


class PsWorker(Sync):
    """One worker of a model whose weights live on servers."""

    saves: ServerSaves | None = None
    skipped = 0  # steps that the other workers have done without this one

    def __init__(
        self, context: PsContext, push: GradientPush, updates: UpdateOnServers, leader: Leader
    ):
        super().__init__(context.replica)
        self.context = context
        self.client = context.client
        self.lead = context.rule.lead
        self.push = push
        self.every_microbatch = push.every_microbatch
        self.pulls: list[tuple[int, int]] = []  # own step, clock of the slowest worker
        self.updates = updates
        self._leader = leader
        self._tracer = context.replica.update.tracer
        self._version = 0
        self._loss = torch.zeros((), device=context.replica.flat.device)
        self._stats: list[dict[str, Any]] = []
        self._rows: ServerStore | None = None
        self._closed = False
        if not self.client.comes_back:
            self._send_state()

    # ------------------------------------------------------------------ a step

    def reduce(self, bucket: slice) -> None:
        self.push.reduce(bucket)

    def _commit(self, step: int) -> Ack:
        """Complete the push of a step; returns the decision of the leader."""
        with self._tracer.span(WAIT, f"push step {step}"):
            loss_flags = self.push.finish()
            lr = self.updates.learning_rate(step)
            saves = self.saves
            save = None if saves is None else saves.due(step + 1)
            if saves is not None and saves.may_ask(step + 1):
                self.push.deposit()  # what compression has not sent yet
            commit = Commit(step, self._version, self.batch_fraction, lr, save)
            ack = self._decide(commit, loss_flags)
            if saves is not None and ack.save is not None:
                saves.accepted = ack.save
            return ack

    def _decide(self, commit: Commit, loss_flags: Tensor) -> Ack:
        return self._leader.commit(commit, loss_flags)

    def _take(self, pending: Pending) -> PullResult:
        """Wait for a pull and use what it has brought."""
        with self._tracer.span(WAIT, "pull") as more:
            result = pending.wait()
            if more is not None:
                more["call"] = f"version {result.version}"
        self._version = result.version
        if result.slowest is not None:
            self.pulls.append((self.update.steps, result.slowest))
        self.updates.take(result)
        return result

    # ------------------------------------------------------------------ state

    def row_store(self) -> ServerStore:
        rule = self.context.rule
        rules = RowRules(
            version=lambda: self._version,
            seen_by=self.context.servers.seen_by,
            copy_lag=rule.workers if rule.applies_each_push else 0,
            may_cache=not rule.is_synchronous,
            may_copy=not self.context.servers.has_replicas,
        )
        self._rows = ServerStore(self.client, rules)
        return self._rows

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        self._take_latest()
        served = self.updates.served_optimizer if optimizer else None
        self._on_lowest_survivor(self._fetch_state if served is not None else lambda: None)
        try:
            with nullcontext() if self._rows is None else self._rows.latest():
                yield
        finally:
            if served is not None:
                served.state.clear()

    def after_load(self) -> None:
        self._send_state()

    def state(self) -> dict[str, Tensor]:
        if not self.push.has_state:
            return {}
        self.push.deposit()
        self._barrier()
        return self._on_lowest_survivor(self.push.collect) or {}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        self.push.check_state(tensors)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.push.load_state(tensors)

    def _take_latest(self) -> None:
        """Make the model hold the latest weights of the servers."""
        raise NotImplementedError

    def _on_lowest_survivor(self, action: Callable[[], T]) -> T | None:
        """Let the lowest surviving worker act for all; returns its result there."""
        raise NotImplementedError

    def _send_state(self) -> None:
        """Give the servers the weights, step and optimizer state of the lowest survivor."""
        self._version = self.update.steps
        self._on_lowest_survivor(self._set_state)
        if self.updates.served_optimizer is not None:
            self.updates.served_optimizer.state.clear()

    def _set_state(self) -> None:
        optimizer = self.updates.served_optimizer
        params = self.flat.params
        steps = self.update.steps
        with self._tracer.span(WAIT, "send state"):
            states = [shard_state(optimizer, params, spec, steps) for spec in self.client.specs]
            self.client.set_state(states, self.flat.data.detach().cpu())

    def _fetch_state(self) -> None:
        with self._tracer.span(WAIT, "fetch state"):
            states = self.client.get_state()
        join_state(self.update.optimizer, self.flat.params, self.client.specs, states)

    @property
    def _is_lowest_survivor(self) -> bool:
        return self.context.replica.group.rank == self.lowest_survivor

    def _barrier(self) -> None:
        with self._tracer.span(WAIT, "barrier"):
            self._leader.barrier()
        self.lowest_survivor = self._leader.lowest_survivor

    # ------------------------------------------------------------------ workers that come back

    def come_back(self) -> Comeback | None:
        if not self.client.comes_back:
            return None
        entered = self.client.enter()
        self.update.steps = entered.step
        if entered.gives_weights:
            self._set_state()
        return Comeback(entered.step, entered.clock)

    def meet(self, number: int, generations: Sequence[int]) -> None:
        self.client.meet(number, generations)

    # ------------------------------------------------------------------ the end of a run

    def report(self) -> dict[str, Any]:
        ahead = Counter(max(0, step - slowest) for step, slowest in self.pulls)
        sent_bytes = [link.sent_bytes for link in self.client.links]
        return {
            "servers": counts_of_shards(self._stats),
            "tables": table_loads(self._stats),
            "skipped": self.skipped,
            "steps_ahead": {str(k): ahead[k] for k in sorted(ahead)},
            "bytes_sent": sum(sent_bytes) + self.client.shared_bytes,
            "sent_bytes": sent_bytes,
            "received_bytes": [link.received_bytes for link in self.client.links],
            "shared_memory": self.client.shares_memory,
            "interruptions_s": [link.route.interruptions_s() for link in self.client.links],
        }

    def summary(self) -> list[str]:
        counted = "replica" if self.context.replica.replica_group.size > 1 else "worker"
        rule = self.context.rule
        holder = "shard" if any(link.has_copies for link in self.client.links) else "server"
        sentences = summarize(self._stats, rule, self.client.shared_memory, counted, holder)
        tables = {} if self._rows is None else self._rows.tables
        hits = {name: t.cache.hit_rate for name, t in tables.items() if t.cache is not None}
        rows = load_sentences(table_loads(self._stats), hits)
        return [*sentences, *self.push.summary(), *rows]

    def server_tensors(self) -> list[Tensor]:
        return tensors_of_server(self.context.servers.server_here)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        has_failed = sys.exc_info()[0] is not None  # a worker that failed does not say goodbye
        try:
            if not has_failed:
                self._finish()
        except ShoalError:
            has_failed = True  # the step has raised the reason already
        finally:
            if self.saves is not None:
                self.saves.close()
            self.client.close()
            self.context.servers.close(has_failed)

    def _finish(self) -> None:
        self._leave()
        if self._is_lowest_survivor or self.context.servers.has_processes:
            self._stats = self.client.stats(final=True)

    def _leave(self) -> None:
        self._leader.leave()
        self.lowest_survivor = self._leader.lowest_survivor
