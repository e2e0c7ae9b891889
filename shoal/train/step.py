"""One training step as a callable: forward, backward, agreement and update."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.comm.group import Op
from shoal.comm.mesh import Mesh
from shoal.data.sampling import Batch, Cut, WholeBatch, mix, num_rows, take
from shoal.embedding.module import apply_embeddings, bind_embeddings
from shoal.errors import BadInput, NotBuilt
from shoal.observe.trace import Tracer
from shoal.pytree import Tree, map_tensors
from shoal.replica.batchnorm import (
    Presence,
    globalize,
    has_batchnorm,
    note_microbatches,
    running_statistics,
    settle,
)
from shoal.replica.engine import EngineOptions
from shoal.replica.microbatch import Loss, MicroBatch, Precision
from shoal.replica.shard import build_shard
from shoal.runtime.faults import Faults, busy_s
from shoal.schedules.pipelines.actions import accumulate as accumulate_schedule
from shoal.strategy.base import Batches, SyncTerm
from shoal.strategy.strategy import Strategy
from shoal.strategy.terms import Pp, Tp
from shoal.sync.base import Replica
from shoal.sync.optimizer_step import LearningRate, OptimizerFactory, OptimizerStep
from shoal.sync.registry import plan_for

_HINTS = {
    "loss": "it takes (outputs, targets)",
    "lr": "it takes the number of the step and gives the learning rate of that step",
    "count": "it takes a batch and gives what the loss is a mean over",
}
Count = Callable[[Any], int | float | Tensor]


@dataclass(frozen=True)
class StepOptions:
    """What `job.step` was asked for; checked once, here."""

    clip_norm: float | None = None
    accumulate: int = 1
    precision: Precision = "fp32"
    exact: bool = False
    microbatches: int = 8
    batchnorm: Literal["global", "local"] = "global"

    def check(self, replicas: int) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadInput(f"clip_norm has to be above 0, not {self.clip_norm}")
        if self.accumulate < 1 or self.microbatches < 1:
            raise BadInput("accumulate and microbatches count micro-batches: at least 1")
        if self.batchnorm not in ("global", "local"):
            raise BadInput(f'batchnorm is "global" or "local", not {self.batchnorm!r}')
        if self.exact and self.accumulate > 1:
            raise BadInput("exact=True accumulates by itself: set microbatches, not accumulate")
        if self.exact and self.microbatches % replicas:
            raise BadInput(
                f"exact=True deals out {self.microbatches} micro-batches, which {replicas} "
                "replicas do not divide: choose another microbatches or number of workers"
            )

    def under(self, pp: Pp | None, model: nn.Module | None = None) -> StepOptions:
        """With the micro-batches that a pipeline wants: its own word, or `accumulate`'s, or two
        for each stage. One where there is no pipelining, and where BatchNorm looks at the whole
        batch: more of them would give another result than one worker does."""
        if pp is None or pp.size == 1:
            return self
        if self.precision == "fp16":
            raise BadInput(f'{pp} has no scaling of losses for precision="fp16": take "bf16"')
        if self.exact:
            if pp.microbatches is not None:
                raise BadInput(
                    f"{pp}: with exact=True the micro-batches are those of job.step "
                    f"(microbatches={self.microbatches}); leave them out here"
                )
            return self
        is_whole = pp.schedule == "inter-op" or (
            self.batchnorm == "global" and model is not None and has_batchnorm(model)
        )
        default = 1 if is_whole else 2 * pp.size
        chosen = self.accumulate if self.accumulate > 1 else default
        return replace(self, accumulate=pp.microbatches or chosen)

    def check_split(self, tp: Tp | None) -> None:
        if tp is None or tp.size == 1:
            return
        if self.exact:
            raise BadInput(
                f"exact=True adds up as one worker does, and {tp} adds up the parts of a sum on "
                "several: leave one of them out"
            )
        if self.precision == "fp16":
            raise BadInput(f'{tp} has no scaling of losses for precision="fp16": take "bf16"')

    def local_microbatches(self, replicas: int) -> int:
        return self.microbatches // replicas if self.exact else self.accumulate

    def cut(self, replica: int, replicas: int) -> Cut:
        """How a global batch is dealt out under these options."""
        microbatches = self.microbatches if self.exact else self.accumulate
        return Cut(replica, replicas, microbatches, self.exact)


class OneByOne(Sequence[MicroBatch]):
    """Micro-batches that are made when the engine comes to them, and then let go of."""

    def __init__(self, source: Iterator[MicroBatch], length: int):
        self._source = source
        self._length = length
        self._at: tuple[int, MicroBatch] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, m: Any) -> Any:
        if self._at is None or self._at[0] != m:
            self._at = (m, next(self._source))
        return self._at[1]


class Step:
    """`step(batch)` trains on a global batch and returns its loss, the same on every rank."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: OptimizerFactory,
        options: StepOptions,
        *,
        strategy: Strategy,
        mesh: Mesh,
        device: torch.device,
        seed: int,
        lr: LearningRate | None,
        count: Count | None,
        tracer: Tracer,
        say: Callable[[str], None],
        faults: Faults | None = None,
        example: Tree = None,
    ):
        if faults is not None:
            faults.at_start()
        group = mesh.dp
        options.check(group.size)
        options = options.under(strategy.pp, model)
        options.check_split(strategy.tp)
        for name, value in {"loss": loss, "lr": lr, "count": count}.items():
            if value is not None and not callable(value):
                raise BadInput(f"{name} has to be a function, not {value!r}; {_HINTS[name]}")
        self.options = options
        self.group = group
        self.seed = seed
        self.count = count
        self.mesh = mesh
        term = strategy.sync_for(group.size)
        plan = plan_for(term)
        plan.check(options, group.size)
        self._has_servers = term.has_servers
        if options.exact:
            _make_deterministic(device)
        is_split = mesh.tp.size * mesh.pp.size > 1
        deferred = plan.materialize(model, group, device, is_split)
        self.model = model
        self.embeddings = bind_embeddings(self.model, optimizer, seed)
        self._check_embeddings(say)
        presence = self._share_batchnorm(term, say)
        self.shard = build_shard(self.model, strategy, mesh, device, deferred, example)
        self.flat = plan.layout(self.shard, group, device, deferred)
        self._agree_on_start()
        scaler = torch.amp.GradScaler(device.type) if options.precision == "fp16" else None
        owned = plan.owns(self.flat, group, options.exact)
        self.update = OptimizerStep(
            owned.named,
            optimizer,
            clip_norm=options.clip_norm,
            lr=lr,
            scaler=scaler,
            norm_over=owned.norm_over,
            clipped=owned.clipped,
            total_norm=self.shard.total_norm(None if owned.norm_over is None else group),
            tracer=tracer,
        )
        self.sync = plan.build(
            Replica(
                self.flat,
                self.update,
                group,
                options.microbatches if options.exact else None,
                [] if term.lockstep else running_statistics(self.model),
                say,
                self.shard if is_split else None,
                mesh.replica_group,
            ),
        )
        store = self.sync.row_store()
        if store is not None and self.embeddings:
            bind_embeddings(self.model, optimizer, seed, store)
        self.local_microbatches = options.local_microbatches(group.size)
        self.engine = self.shard.engine(
            loss,
            self.flat,
            self.local_microbatches,
            EngineOptions(
                precision=options.precision,
                # a stage adds gradients up over micro-batches, whose backwards overlap
                every_microbatch=self.sync.every_microbatch
                and (options.exact or mesh.pp.size == 1),
                gradient_scale=self.sync.gradient_scale,
                loss_scale=self.update.scale if scaler is not None else None,
                presence=presence,
                tracer=tracer,
            ),
        )
        self._compute = self.engine.run
        if faults is not None:
            self._compute = faults.around(
                self.engine.run, lambda: self.steps + 1, _clock_of(device)
            )
        self.steps = 0
        self._checked = self._reversed = False
        self._everything = term.batches is Batches.WHOLE_DATASET
        self.latest: Batch | None = None  # what job.batches has yielded last
        self.after: list[Callable[[Step, Tensor], None]] = []

    def __call__(self, batch: Any) -> Tensor:
        microbatches = self._cut(batch)
        self.sync.batch_fraction = _share(batch, microbatches)
        self.sync.begin()
        own = self.sync.skip() if self.sync.is_skipped else self._train(microbatches)
        loss = self.shard.broadcast_loss(own)
        worth = self._worth(batch)
        self.steps += worth
        self.update.steps += worth - 1  # the sync has counted one, if this rank updates
        for callback in self.after:
            callback(self, loss)
        return loss

    def _train(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        if not self._checked:
            self.shard.check(microbatches, self.engine)
            self._checked = True
        local = self._compute(microbatches, self.sync.reduce)
        if self.embeddings:  # before the end of the step, of which the rows are part
            self._push_rows(self._everything or any(m.real for m in microbatches))
        self.sync.finish()
        if self.options.exact:
            settle(self.model, self.group)
        return self.sync.loss(local)

    def _push_rows(self, real: bool) -> None:
        if not real:  # a row that stood in was looked up, which is no use of it
            for embedding in self.embeddings:
                embedding.discard()
        lr = self.update.lr(self.steps) if self.update.lr is not None else None
        apply_embeddings(self.embeddings, lr, self.update.optimizer.defaults.get("lr"))

    def add_up_differently(self, parts: int) -> None:
        """Compute the same step with additions in another order, to see what rounding does.

        Each micro-batch is computed in `parts`, as that many workers would. Where the model looks
        at whole micro-batches (BatchNorm), their samples are reversed instead.
        """
        if self.options.exact or has_batchnorm(self.model) or self._everything:
            self._reversed = True
        else:
            self.local_microbatches *= parts
            self.engine.follow(accumulate_schedule(1, 0, self.local_microbatches))

    def _check_embeddings(self, say: Callable[[str], None]) -> None:
        if not self.embeddings:
            return
        if self.mesh.world.size > 1 and not self._has_servers:
            raise NotBuilt(
                "shoal.Embedding trains on several workers under ps, not otherwise; under hogwild "
                "take nn.Embedding(sparse=True)"
            )
        if self.mesh.pp.size > 1 or self.mesh.tp.size > 1:
            raise NotBuilt(
                "shoal.Embedding is not built for a model that is split over workers: leave out "
                "tp and pp, or take nn.Embedding"
            )
        if self.options.exact or self.options.precision == "fp16":
            raise BadInput('shoal.Embedding trains neither with exact=True nor with "fp16"')
        if self.options.clip_norm is not None:
            say("clip_norm bounds the gradient of the parameters; rows of shoal.Embedding are none")

    def _share_batchnorm(self, term: SyncTerm, say: Callable[[str], None]) -> Presence:
        if not has_batchnorm(self.model) or self.options.batchnorm == "local":
            return Presence()
        if self.group.size > 1 and not term.lockstep:
            statistics = (
                "running statistics are shared like the weights"
                if term.batches is Batches.IN_TURNS
                else "the mean of the running statistics is tested and saved"
            )
            say(f"BatchNorm sees each replica's own samples under {term.name}; {statistics}")
            return Presence()
        if self.mesh.pp.size > 1 and self.options.accumulate == 1 and not self.options.exact:
            say(
                "BatchNorm sees the whole batch, so the stages compute it in one piece, one after "
                "the other; with pp(…, microbatches=n) they work at the same time, and it sees "
                "micro-batches"
            )
        if self.options.exact or self.options.accumulate > 1:
            say(
                "BatchNorm statistics are those of each micro-batch, not of the whole batch, "
                "because the batch is computed in several micro-batches"
            )
        if self.options.exact:
            return note_microbatches(self.model)
        return globalize(self.model, self.group.duplicate()) if self.group.size > 1 else Presence()

    def _agree_on_start(self) -> None:
        """Every rank starts from rank 0's parameters and buffers."""
        if self.group.size == 1:
            return
        if self.flat.data.numel():
            self.group.broadcast(self.flat.data).wait()
        trained = {id(p) for p in self.flat.params}
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            if id(tensor) not in trained and tensor.numel() and tensor.device.type != "meta":
                whole = tensor.detach().contiguous()
                self.group.broadcast(whole).wait()
                tensor.detach().copy_(whole)

    def _cut(self, batch: Any) -> Sequence[MicroBatch]:
        """The micro-batches of this replica, on the device, each with its share of the loss."""
        if isinstance(batch, WholeBatch):
            return self._cut_whole(batch)
        return self._cut_one(batch)

    def _cut_whole(self, whole: WholeBatch) -> Sequence[MicroBatch]:
        """The same of a whole dataset, piece by piece."""
        if self.count is not None:
            raise BadInput(
                "count needs to see a batch before its gradients, and mapreduce's batch is the "
                'whole dataset: take mapreduce(batch="mini")'
            )
        if len(whole.parts) != len(self.engine.actions) // 2:
            self.engine.follow(accumulate_schedule(1, 0, len(whole.parts)))
        return OneByOne(self._cut_pieces(whole), len(whole.parts))

    def _cut_pieces(self, whole: WholeBatch) -> Iterator[MicroBatch]:
        done = 0
        for piece in whole.pieces:
            share = piece.total / whole.total
            for micro in self._cut_one(piece, done):
                assert isinstance(micro.weight, float)
                yield micro._replace(weight=micro.weight * share)
                done += 1

    def _cut_one(self, batch: Any, first: int = 0) -> list[MicroBatch]:
        ranges, parts, total = self._measure(batch)
        pair = tuple(batch)
        pieces = [pair] if len(ranges) == 1 else [_rows(pair, r) for r in ranges]
        counts = self._counts(pieces, parts)
        weights = self._weights(counts, total, self._worth(batch))
        device = self.flat.device
        found = []
        for m, (piece, samples, count, weight) in enumerate(
            zip(pieces, parts, counts, weights, strict=True)
        ):
            inputs, targets = map_tensors(
                lambda t: t.to(device, non_blocking=True), self._in_order(piece)
            )
            stream = self._stream(first + m)
            real = samples > 0
            alone = self.group.size == 1 and not self.options.exact
            found.append(
                MicroBatch(
                    inputs,
                    targets,
                    weight,
                    real,
                    count == 0,
                    alone and not real,
                    stream,
                )
            )
        return found

    def _in_order(self, piece: Tree) -> Tree:
        return (
            map_tensors(lambda t: t.flip(0) if t.dim() else t, piece) if self._reversed else piece
        )

    def _measure(self, batch: Any) -> tuple[list[range], Sequence[int], int | None]:
        """Rows and samples of each micro-batch, and the samples of the global batch if known.

        A script may pass on what it made of a batch (an augmentation, say): as long as it has
        the same number of rows it is cut as the batch that it came from.
        """
        if isinstance(batch, Batch) and len(batch.parts) == self.local_microbatches == 1:
            return [range(0)], batch.parts, batch.total  # one piece: nothing to cut
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise BadInput("step takes a batch that is a pair (inputs, targets)")
        rows = num_rows(tuple(batch))
        known = batch if isinstance(batch, Batch) else self.latest
        total = batch.total if isinstance(batch, Batch) else None
        if known is not None and len(known.parts) == self.local_microbatches:
            ends = list(itertools.accumulate(max(1, samples) for samples in known.parts))
            if ends[-1] == rows:
                starts = [0, *ends[:-1]]
                return list(map(range, starts, ends)), known.parts, total
        ranges = Cut(microbatches=self.local_microbatches).rows(rows)
        return ranges, [len(r) for r in ranges], total

    def _worth(self, batch: Any) -> int:
        """How many global batches are trained on while this replica trains on one of them."""
        known = batch if isinstance(batch, Batch) else self.latest
        return 1 if known is None else known.of

    def _counts(self, pieces: list[Tree], parts: Sequence[int]) -> Sequence[float]:
        """What the loss of each micro-batch is a mean over, here."""
        if self.count is None:
            return parts
        return [
            float(self.count(piece)) if samples else 0.0
            for piece, samples in zip(pieces, parts, strict=True)
        ]

    def _weights(
        self, counts: Sequence[float], total: int | None, worth: int
    ) -> Sequence[float | Callable[[], Tensor]]:
        """Each micro-batch's share: its count over the count of the global batch.

        Where the global count is not known, the ranks add it up while forward runs, unless they
        do not wait for each other: then each takes its part for an equal one.
        """
        if self.count is None and total is not None:
            return [count / total for count in counts]
        if not self.sync.synchronous:  # nobody adds up with the others: all parts count alike
            own = max(float(sum(counts)), 1e-300) * self.group.size / worth
            return [count / own for count in counts]
        everybody = torch.tensor(float(sum(counts)), dtype=torch.float64).to(self.flat.device)
        work = self.group.all_reduce(everybody, Op.SUM)

        def share(count: float) -> Tensor:
            work.wait()
            return count / everybody.clamp(min=1e-300)

        return [partial(share, count) for count in counts]

    def _stream(self, m: int) -> int:
        """The seed of a micro-batch's own randomness; of its place in the batch when exact."""
        if self.options.exact:
            place = self.group.rank * self.local_microbatches + m
            return mix(self.seed, 2, self.steps, place)
        return mix(self.seed, 3, self.steps, self.group.rank, m)


def _share(batch: Any, microbatches: Sequence[MicroBatch]) -> float:
    """What this replica computes of the global batch, where it is known beforehand."""
    if isinstance(batch, WholeBatch):
        return sum(batch.parts) / batch.total
    return sum(m.weight for m in microbatches if not callable(m.weight))


def _rows(tree: Tree, rows: range) -> Tree:
    return map_tensors(lambda t: take(t, [rows]) if t.dim() else t, tree)


def _clock_of(device: torch.device) -> Callable[[], float]:
    """Reads the time that computing takes."""
    if device.type != "cuda":
        return busy_s

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.monotonic()

    return read


def _make_deterministic(device: torch.device) -> None:
    """Fix what else decides the order of additions: threads, and CUDA's choice of kernels."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
