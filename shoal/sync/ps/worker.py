"""The parameter server, from a worker: gradients are pushed while backward runs, weights pulled.

    begin    weights that the rule allows have arrived
    reduce   this bucket lies in the memory shared with the servers, or goes out to them
    finish   the push is whole: commit, and pull. Synchronous: wait for the new weights

What the rules mean (`server/admission.py` decides):

    ps                synchronous: the result of one device
    ps(staleness=0)   the same
    ps(quorum=q)      the update is the mean over the samples of the workers that were in time. A
                      step that the others have done already is not computed any more
    ps(staleness=k)   each push is applied as it comes; its share of the batch makes the pushes of
                      one step together as long as one synchronous step. Over a network the next
                      weights are on their way while backward runs, and lack the push that it
                      makes; in shared memory a pull is a copy, and comes after the push
    ps(mode="async")  the same, and nobody waits. A worker that is far behind leaves out steps

The loss is that of the global batch where everybody is waited for, and else the worker's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.comm.mesh import ReplicaGroup
from shoal.errors import ShoalError
from shoal.replica.flat_params import FlatParams
from shoal.replica.ordered_sum import Node, note_leaf, runs_of, whole_subtrees
from shoal.server.client import Client, PendingPull, PullResult
from shoal.server.consistency import Rule
from shoal.server.discovery import Hosts, tell_all
from shoal.server.protocol.messages import Ack, Commit
from shoal.server.row_client import ServerStore
from shoal.sync.base import Copies, Sync
from shoal.sync.compressed_sum import synchronize_copies
from shoal.sync.optimizer_step import OptimizerStep
from shoal.sync.ps.compressed_push import PackedPush
from shoal.sync.ps.optimizer_shards import cut_state, whole_state

BUCKET_BYTES = 4 << 20


class ParameterServer(Sync):
    """One worker of a model whose truth lives on servers."""

    whose = "worker"  # what the counts of pushes are counts of
    may_pull_ahead = True

    def __init__(
        self,
        flat: FlatParams,
        update: OptimizerStep,
        group: Group,
        client: Client,
        hosts: Hosts,
        rule: Rule,
        microbatches: int | None,
        copies: Copies | None,
        replica_group: ReplicaGroup,
    ):
        """`copies`: where what several workers of a replica hold has to be made equal.

        `replica_group` are these workers.
        """
        self.replica_group = replica_group
        self.flat = flat
        self.update = update
        self.group = group
        self.client = client
        self.hosts = hosts
        self.rule = rule
        self.tracer = update.tracer
        self.synchronous = rule.is_synchronous
        self.every_microbatch = microbatches is not None
        self.server_updates = client.specs[0].optimizer is not None
        self.pulls: list[tuple[int, int]] = []  # step, clock of the slowest worker at that time
        self.skipped = 0
        by_network = rule.staleness is not None and not client.shares_memory
        self._pulls_ahead = self.may_pull_ahead and by_network
        self._pulling: PendingPull | None = None
        self._asked = False
        self._copies = copies
        self._version = self._fastest = 0
        self._loss = torch.zeros((), device=flat.device)
        self._stats: list[dict[str, Any]] = []
        self._closed = False
        tells = client.specs[0].norm_from_workers and client.specs[0].clip_norm is not None
        self._meanwhile = self._tell_norm if tells and group.rank == 0 else None
        self._exact = None if microbatches is None else _Tree(microbatches, group)
        self.packed = PackedPush(flat, client, copies) if client.specs[0].compress else None
        zero_copy = flat.device.type == "cpu" and self._exact is None and self.packed is None
        flat.grads.watch(flat.buckets(BUCKET_BYTES), memory=client.out[0] if zero_copy else None)
        self._is_apart = not zero_copy  # gradients, from what is pushed
        # the servers write only what this worker waits for, unless a pull is under way in a step
        self._lives_in_inbox = (
            flat.device.type == "cpu"
            and self.server_updates
            and rule.is_synchronous
            and copies is None
        )
        if self._lives_in_inbox:
            shared = client.share_weights(partial(tell_all, group))
            flat.move_to(client.inbox, copy=not shared or group.rank == 0)
        self._give_weights()

    # ------------------------------------------------------------------ a step

    def begin(self) -> None:
        self._arrive()
        self.client.wait_settled()
        step = self.update.steps
        self.is_skipped = self.rule.is_too_late(step, self._version, self._fastest)
        if self._exact is not None:
            self._exact.begin()

    def reduce(self, bucket: slice) -> None:
        if self._pulls_ahead and not self._asked:
            self._ask(self.update.steps + 1, 0)
        if self._exact is not None:
            self._exact.note(bucket, self.flat)
            return
        if self.packed is not None:
            self.packed.reduce(bucket)
            return
        if self._is_apart:
            self.client.out[0, bucket].copy_(self.flat.grads.buffer[bucket])
        self.client.push(bucket)

    def finish(self) -> None:
        step = self.update.steps
        with self.tracer.span("push", f"step {step}"):
            ack = self._decide(self._commit(step), self._heads())
        if self.rule.is_synchronous:
            self._ask(step + 1, step + 1)
            self._arrive()
        else:
            if ack.verdict == "dropped" and self.packed is not None:
                self.packed.take_back()
            self.client.settle(ack.position)
            if not self._pulls_ahead:
                self._ask(step + 1, step + 1 if self.rule.quorum else 0)
            self.flat.zero_grad()
        if self.server_updates:
            self.update.steps += 1

    def skip(self) -> Tensor:
        self.skipped += 1
        self.update.steps += 1
        return self._loss.clone()

    def loss(self, local_loss: Tensor) -> Tensor:
        if not self.rule.is_synchronous:
            self._loss = local_loss / self.batch_fraction if self.batch_fraction else local_loss
        return self._loss.clone()

    def _commit(self, step: int) -> Commit:
        lr = None
        if self.update.lr is not None and self.server_updates:
            lr = float(self.update.lr(step))
            self.update.set_lr(lr)
        return Commit(step, self._version, self.batch_fraction, lr)

    def _decide(self, commit: Commit, heads: Tensor) -> Ack:
        return self.client.commit(commit, heads, self._meanwhile)

    def _tell_norm(self) -> None:
        """The servers know the sum of the gradients of this part; the workers know of the others.

        One replica is enough; its workers add up what their servers have.
        """
        assert self.update.total_norm is not None
        params = self.flat.params
        norms = self.client.norms().items()
        found = {params[i]: torch.tensor(norm, dtype=torch.float64) for i, norm in norms}
        total = self.update.total_norm.of(found).view(1)
        if self._copies is not None:  # whose gradients are not the same on all servers
            self.replica_group.broadcast(total)
        self.client.set_norm(float(total))

    def _heads(self) -> Tensor:
        if self._exact is None:
            return self.flat.grads.header.detach().cpu().clone()[None]
        heads = self._exact.write(self.client.out, self.flat)
        self.client.push(slice(0, self.flat.size))
        return heads

    def _ask(self, step: int | None, version: int) -> None:
        self._pulling = self.client.pull(step, version)
        self._asked = True

    def _await_pull(self) -> PullResult:
        """What the lead has answered; what the others have is there, too."""
        assert self._pulling is not None
        return self._pulling.wait()

    def _arrive(self) -> None:
        """Take what was asked for, as soon as it is there."""
        if not self._asked:
            return
        with self.tracer.span("wait", "pull"):
            lead = self._await_pull()
        self._asked = False
        run = slice(self.flat.offset, self.flat.size)
        self._version = lead.version
        self._fastest = lead.fastest or 0
        if lead.slowest is not None:
            self.pulls.append((self.update.steps, lead.slowest))
        with self.tracer.span("pull", f"version {lead.version}"):
            if self.server_updates:
                if not self._lives_in_inbox:
                    self.flat.data[run].copy_(self.client.inbox[run])
                    synchronize_copies(self.flat, self.flat.data, self._copies)
                self.flat.zero_grad()
            else:
                self.flat.grads.buffer[run].copy_(self.client.inbox[run])
                synchronize_copies(self.flat, self.flat.grads.buffer, self._copies)
        if self.rule.is_synchronous:
            self._loss = lead.head[0].to(self.flat.device)
        if not self.server_updates:
            self.flat.grads.header.copy_(lead.head)
            self.flat.grads.publish()
            self.update.apply()
            self.flat.zero_grad()

    # ------------------------------------------------------------------ around a run

    def row_store(self) -> ServerStore:
        return ServerStore(self.client)

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        if not self.rule.is_synchronous:
            self._arrive()
            self.client.wait_settled()
            self._meet()
            self._take_newest()
        fills = optimizer and self.server_updates
        for _ in self._until_all_agree():
            if fills and self.is_first:
                states = self.client.get_state()
                whole_state(self.update.optimizer, self.flat.params, self.client.specs, states)
        try:
            yield
        finally:
            if fills:
                self.update.optimizer.state.clear()

    def after_load(self) -> None:
        self._give_weights()

    def state(self) -> dict[str, Tensor]:
        if self.packed is None:
            return {}
        self.packed.leave_with_servers()
        self._meet()
        saved: dict[str, Tensor] = {}
        for _ in self._until_all_agree():
            saved = self.packed.collect() if self.is_first else {}
        if self.rule.is_synchronous:
            self._meet()  # nobody goes before what he has left is taken
        return saved

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        if self.packed is not None:
            self.packed.load_state(tensors)

    def report(self) -> dict[str, Any]:
        ahead = Counter(max(0, step - slowest) for step, slowest in self.pulls)
        return {
            "servers": self._stats,
            "skipped": self.skipped,
            "steps_ahead": {str(k): ahead[k] for k in sorted(ahead)},
            "bytes_sent": sum(link.sent_bytes for link in self.client.links)
            + self.client.shared_bytes,
            "sent_bytes": [link.sent_bytes for link in self.client.links],
            "received_bytes": [link.received_bytes for link in self.client.links],
            "shared_memory": self.client.shares_memory,
            **({} if self.packed is None else self.packed.report()),
        }

    def summary(self) -> list[str]:
        packed = [] if self.packed is None else self.packed.summary()
        found = summary_of(self._stats, self.rule, self.client.shares_memory, self.whose)
        return [*found, *packed]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = failed = True
        try:
            self._end()
            if self.is_first or self.hosts.processes:  # who has started some ends them
                self._stats = self.client.stats(final=True)
            failed = False
        except ShoalError:
            pass  # the step has told already why the servers cannot be asked
        finally:
            self.client.close()
            self.hosts.close(failed)

    def _end(self) -> None:
        if not self.rule.is_synchronous:
            self._take_newest()
        self._leave()

    def _leave(self) -> None:
        self.client.leave()
        self.lowest_survivor = self.client.lowest_survivor

    def _take_newest(self) -> None:
        self._arrive()
        self._ask(None, 0)
        self._arrive()

    def _give_weights(self) -> None:
        """The first rank's weights, step and optimizer state are the truth from now on."""
        self._version = self._fastest = self.update.steps
        if not self.rule.is_synchronous:
            self._meet()
        for _ in self._until_all_agree():
            if self.is_first:
                self._set_state()
        if self.rule.is_synchronous:
            self._meet()
        if self.server_updates:
            self.update.optimizer.state.clear()

    def _set_state(self) -> None:
        states = [
            cut_state(
                self.update.optimizer if self.server_updates else None,
                self.flat.params,
                spec,
                self.update.steps,
            )
            for spec in self.client.specs
        ]
        self.client.set_state(states, self.flat.data.detach().cpu())

    @property
    def is_first(self) -> bool:
        return self.group.rank == self.lowest_survivor

    def _meet(self) -> None:
        self.client.barrier()
        self.lowest_survivor = self.client.lowest_survivor

    def _until_all_agree(self) -> Iterator[None]:
        """Do what the first rank does for all; again, when it is lost meanwhile."""
        first = None
        while first != self.lowest_survivor:
            first = self.lowest_survivor
            yield
            if not self.rule.is_synchronous:
                self._meet()


class _Tree:
    """Gradients per micro-batch, added up in the order of a tree; whole subtrees are pushed."""

    def __init__(self, microbatches: int, group: Group):
        self.root = (0, microbatches)
        self.run = runs_of(microbatches, group.size)[group.rank]
        self.nodes = whole_subtrees(self.root, self.run)

    def begin(self) -> None:
        self._sums: dict[int, dict[Node, Tensor]] = {}
        self._head: dict[Node, Tensor] = {}

    def note(self, bucket: slice, flat: FlatParams) -> None:
        sums = self._sums.setdefault(bucket.start, {})
        note_leaf(self.root, self.run[0], sums, flat.grads.buffer[bucket])
        if bucket.start == 0:
            note_leaf(self.root, self.run[0], self._head, flat.grads.header)

    def write(self, out: Tensor, flat: FlatParams) -> Tensor:
        """Put the sums of the subtrees into `out`, one after the other; returns their heads."""
        heads = torch.zeros(len(out), flat.header_size, dtype=flat.grads.header.dtype)
        for i, node in enumerate(self.nodes):
            for bucket in flat.grads.buckets:
                out[i, bucket].copy_(self._sums[bucket.start][node])
            heads[i].copy_(self._head[node])
        return heads


def summary_of(
    stats: Sequence[dict[str, Any]],
    rule: Rule,
    shares_memory: bool = False,
    whose: str = "worker",
) -> list[str]:
    """What the servers counted, in sentences."""
    if not stats:
        return []
    lead = stats[0]
    found = []
    if not rule.is_synchronous and "workers" in lead:
        for worker, counts in lead["workers"].items():
            words = [f"{counts['admitted']} pushes counted"]
            if rule.quorum is not None:
                words.append(f"{counts['folded']} folded into a later step")
                words.append(f"{counts['dropped']} dropped as late")
            if lead["left_out"][worker]:
                words.append(f"{lead['left_out'][worker]} steps left out")
            found.append(f"{whose} {worker}: {', '.join(words)}")
        missed = ", ".join(f"{k}: {v}" for k, v in lead["missed_updates"].items())
        found.append(f"updates between a pull and its push, and how often: {missed}")
    for index, server in enumerate(stats):
        found.append(
            f"server {index}: {server['updates']} updates, {server['requests']} requests, "
            f"{server['received_bytes'] / 1e6:.1f} MB in, {server['sent_bytes'] / 1e6:.1f} MB out"
            + (" by sockets; gradients and weights by shared memory" if shares_memory else "")
        )
    return found
