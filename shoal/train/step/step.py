"""One training step as a callable: forward, backward, synchronization and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from shoal.comm.group import Op
from shoal.comm.mesh import Mesh
from shoal.errors import BadInput
from shoal.replica.batchnorm import forget_statistics, update_running_statistics
from shoal.replica.compiled import Compiler, graph_breaks
from shoal.replica.engine import Engine
from shoal.replica.flat_params import FlatParams
from shoal.replica.forward_buffers import ForwardBuffers, tell_of_change
from shoal.replica.grad_buckets import OnBucket
from shoal.replica.loss import in_form_of
from shoal.replica.microbatch_context import MicroBatch
from shoal.replica.split.shard import ReplicaShard
from shoal.runtime import clock
from shoal.runtime.trace import OFF, STEP, Tracer
from shoal.schedules.pipelines import accumulate
from shoal.strategy.base import SyncTerm
from shoal.sync import Sync
from shoal.sync.optimizer_step import OptimizerStep
from shoal.train.data import AnyBatch, Batch, DictBatch
from shoal.train.data.sampling import FullDatasetBatch
from shoal.train.step.alike import AlikeLosses
from shoal.train.step.cut_batch import BatchCutter
from shoal.train.step.options import StepOptions
from shoal.train.step.prepare_model import KnownParameters, PreparedModel

if TYPE_CHECKING:
    from shoal.server.embedding.module import Embedding

Compute = Callable[[Sequence[MicroBatch], OnBucket], Tensor]
AfterStep = Callable[["Step", Tensor], None]


@dataclass(eq=False)
class Step:
    """`step(batch)` trains on a global batch and returns its loss, the same on every rank.

    `build_step` makes it. `compute` is `engine.run`, with injected faults around it if asked for.
    """

    prepared: PreparedModel
    shard: ReplicaShard  # of some of its parameters, or all
    mesh: Mesh
    flat: FlatParams
    update: OptimizerStep
    sync: Sync
    engine: Engine
    cutter: BatchCutter
    tracer: Tracer = OFF
    steps: int = 0
    latest: AnyBatch | None = None  # what job.batches yielded last
    after: list[AfterStep] = field(default_factory=list)
    is_own_loop: bool = False  # the script computes forward, loss and backward itself
    saves_model: bool = True  # False: another step of the job saves the same model
    compiler: Compiler | None = None  # of what is computed here, once it was checked
    around: Callable[[Step, Any], Any] | None = None  # what is called in place of `attempt`
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))  # of the latest step
    _is_checked: bool = False
    _names: list[str] | None = None  # of what the loss function returns besides the loss
    _numbers: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model: nn.Module = self.prepared.model
        self.options: StepOptions = self.prepared.options
        self.term: SyncTerm = self.prepared.term
        self.embeddings: list[Embedding] = self.prepared.embeddings
        self.parameters = KnownParameters(self.model)
        self.compute: Compute = self.engine.run
        self.alike = AlikeLosses(self.shard.say, self.mesh.data.size)

    @property
    def optimizer(self) -> NoReturn:
        """What scripts for one device look for."""
        raise BadInput(
            "step.optimizer: the strategy keeps the optimizer, in shards or on servers where it "
            "says so; give job.step lr=… or scheduler=… for the learning rate, or use job.setup, "
            "which gives a loop of your own its optimizer"
        )

    def __call__(self, *given: Any) -> Any:
        """The loss; where the loss function returns several numbers, all of them in its form."""
        if len(given) != 1:
            raise BadInput(
                "step(batch) takes a batch as one argument, such as step((inputs, targets)), not "
                f"{len(given)}"
            )
        [batch] = given
        return self.attempt(batch) if self.around is None else self.around(self, batch)

    def attempt(self, batch: Any, reports: bool = True) -> Any:
        """Train on a batch. `reports`: call what is to be called after a step.

        Where it raises PeerLost it can be undone: see `RollbackPoint`. Where replicas hold
        shards it may also have ended: `sync.movable` knows.
        """
        start_ns = clock.monotonic_ns()
        self.parameters.check()
        known = batch if isinstance(batch, (Batch, DictBatch)) else self.latest
        microbatches = self.cutter.cut(batch, known, self.steps)
        if isinstance(batch, FullDatasetBatch):
            fraction = sum(batch.microbatch_sizes) / batch.total
        else:  # as far as it is known before the step
            fraction = sum(m.weight for m in microbatches if not callable(m.weight))
        if axes := self.shard.token_axes:
            fraction = float(axes.sum(torch.tensor(fraction, device=self.flat.device)))
        self.sync.batch_fraction = fraction
        batches = 1 if known is None else known.concurrent  # of all replicas in one step
        self.sync.next_steps = self.steps + batches
        self.sync.begin()
        self.loss = self.shard.broadcast_loss(
            self.sync.skip() if self.sync.is_skipped else self._train(batch, microbatches)
        )
        self.sync.commit()
        self._count(batches)
        self.tracer.add(STEP, start_ns, clock.monotonic_ns(), "steps", f"step {self.steps}")
        if reports:
            self._report()
        return self.result()

    @property
    def number(self) -> int:
        """Of the step that is under way; where replicas take batches in turns, of its own batch."""
        is_in_turns = self.sync.next_steps > self.steps + 1
        return self.steps + 1 + (self.mesh.dp.rank if is_in_turns else 0)

    def _report(self) -> None:
        for callback in self.after:
            callback(self, self.loss)

    def result(self) -> Any:
        """What the latest step has returned."""
        return in_form_of(self._names, self.loss, self._numbers)

    # ------------------------------------------------------------------ elastic runs

    def numbers(self) -> dict[str, Any]:
        """What the latest step has returned, for another worker."""
        losses = [float(number) for number in (self.loss, *self._numbers)]
        return {"names": self._names, "losses": losses}

    def adopt(self, document: dict[str, Any]) -> None:
        """The others have done the step that this worker was interrupted in; its state is here."""
        loss, *numbers = (torch.tensor(x, device=self.flat.device) for x in document["losses"])
        self._names = document["names"]
        self._numbers = numbers
        self.loss = loss
        self._report()

    def keep(self, reports: bool) -> None:
        """Others have committed the step in whose commit this worker was interrupted."""
        self.sync.is_committing = False
        self._count(1)
        if reports:
            self._report()

    def end_interrupted(self) -> None:
        """The update is done; this worker was interrupted before it could return."""
        self.loss = self.sync.loss(torch.zeros((), device=self.flat.device))
        self._count(1)
        self._report()

    def abandon(self, buffers: Sequence[Tensor]) -> None:
        """Undo what an interrupted attempt has left; `buffers` are those of the model before it."""
        self.flat.grads.abandon()
        forget_statistics(self.model)
        with torch.no_grad():
            for now, before in zip(self.model.buffers(), buffers, strict=True):
                now.copy_(before)

    def regroup(self) -> None:
        """There are other replicas than before."""
        self.sync.regroup()
        self.cutter.regroup()
        self.engine.actions = accumulate(self.cutter.local_microbatches)
        self.engine.gradient_scale = self.sync.gradient_scale

    def _train(self, batch: Any, microbatches: Sequence[MicroBatch]) -> Tensor:
        is_dataset = isinstance(batch, FullDatasetBatch)
        if is_dataset and len(microbatches) != len(self.engine.actions) // 2:
            self.engine.actions = accumulate(len(microbatches))
        before = None
        if not self._is_checked:
            self.shard.check(microbatches, self.engine)
            self._is_checked = True
            if self._takes_whole_batches():
                known = batch if isinstance(batch, (Batch, DictBatch)) else self.latest
                microbatches = self.cutter.cut(batch, known, self.steps)
            elif self.cutter.cuts:
                before = ForwardBuffers(self.model)
            if self.compiler is not None and not self.flat.compile(self.compiler):
                self.engine.stage.compile(self.compiler)
        if self.compiler is None:
            loss = self.compute(microbatches, self.sync.reduce)
        else:
            with self.compile_errors():
                loss = self.compute(microbatches, self.sync.reduce)
        local = self.shard.token_axes.sum(loss)
        if self.compiler is not None:
            self.shard.say(graph_breaks().news())
        if before is not None:
            name = self.shard.changed_by_batch or before.may_follow_from_rows()
            tell_of_change(self.model, name, self.shard.say)
        if not self.flat.grads.buckets:
            self.shard.token_axes.sum_parameter_gradients(self.flat.params)
        if self.embeddings:  # before `finish`, since the rows are part of the update
            from shoal.server.embedding.module import apply_embeddings

            if not is_dataset and not any(m.real for m in microbatches):
                for embedding in self.embeddings:  # the lookups of a placeholder row do not count
                    embedding.discard()
            lr = self.update.learning_rate(self.steps)
            apply_embeddings(self.embeddings, lr, self.update.optimizer.defaults.get("lr"))
        # the update comes last: where a rank is lost before, the step can be done again
        if self.options.exact:
            missing = self.cutter.missing_microbatches
            update_running_statistics(self.model, self.mesh.dp, missing)
        self._numbers = self._other_numbers()
        self.sync.finish()
        loss = self.sync.loss(local)
        if self.latest is None and self.sync.collects and self.sync.synchronous:
            self.alike.note(local * self.mesh.data.size, loss)
        return loss

    def compile_errors(self) -> AbstractContextManager[None]:
        return nullcontext() if self.compiler is None else self.compiler.errors(self.model)

    def _takes_whole_batches(self) -> bool:
        """From now on: where stages change buffers by the rows that they get, as on one device."""
        name = self.shard.changed_by_batch
        if not self.options.may_take_whole_batches:
            return False
        found = torch.tensor(float(name is not None), device=self.flat.device)
        if self.term.lockstep and self.mesh.dp.size > 1:
            self.mesh.dp.all_reduce(found, Op.MAX).wait()
        if not found:
            return False
        self.shard.say(
            f"the forward of {type(self.model).__name__} changes {name} by the batch, so the "
            "stages compute it in one micro-batch, one after the other; with "
            "pp(…, microbatches=n) they overlap, and each micro-batch changes it"
        )
        self.options = self.cutter.options = replace(self.options, accumulate=1)
        self.cutter.regroup()
        self.shard.take_whole_batches(self.engine)
        return True

    def _other_numbers(self) -> list[Tensor]:
        """What the loss function returned besides the loss: means over the global batch.

        Where replicas do not take every step together they are means over its own samples.
        """
        if self._names is None:  # the last stage of a pipeline alone calls the loss
            self._names = self.shard.broadcast(self.engine.numbers.names or [])
        if not self._names:
            return []
        numbers = torch.zeros(len(self._names), dtype=torch.float64, device=self.flat.device)
        if self.engine.stage.is_last:
            numbers = self.shard.token_axes.sum(self.engine.numbers.total(self.flat.device))
        if self.term.lockstep and self.sync.synchronous:
            self.mesh.dp.all_reduce(numbers).wait()
        elif self.sync.batch_fraction:
            numbers = numbers / self.sync.batch_fraction
        return list(self.shard.broadcast(numbers).float().unbind())

    def _count(self, steps: int) -> None:
        self.steps += steps
        self.update.steps += steps - 1  # the sync has counted one, if this rank updates
