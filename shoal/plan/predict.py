"""How long a step takes and how much memory it needs: one strategy on one cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cluster.hardware import Device
from shoal.cluster.program import FUSED, ModelProgram
from shoal.errors import BadInput
from shoal.plan.accuracy import kind_of, range_of, what_was_seen
from shoal.plan.goodput import Failures, elastic_term, goodput_of
from shoal.plan.prediction import DeviceMemory, Part, Prediction
from shoal.plan.step.collective_time import SHOAL_ORDER, group_of
from shoal.plan.step.slow_workers import SlowWorkers, slow_replicas
from shoal.plan.step.step_price import PipelineShape, ReplicaPrice, ReplicaPricer, Stage
from shoal.plan.sync_price import SyncQuestion, Zero3
from shoal.plan.sync_price.price import price_of
from shoal.plan.workloads import Recompute, Split, Workload, parameters_of
from shoal.schedules.pipelines.catalog import schedule
from shoal.schedules.steps.tensor_layout import TensorLayout
from shoal.strategy.base import Batches, SyncTerm
from shoal.strategy.strategy import Layout, Strategy, as_strategy


@dataclass(frozen=True)
class PlanSettings:
    """What a step has beside its strategy."""

    batch: int  # samples of the global batch
    microbatch: int | None = None  # samples; None: as pp or the script says
    recompute: Recompute = "none"
    flash_attention: bool = True  # scores are never in memory
    overlap: bool = True  # gradients are sent while backward runs
    even_stages: bool = False  # as many blocks in every stage, however long the head takes
    scatter_sends: bool = False  # ranks of tp send a part each of what a stage sends, and gather it
    zero3_of: Zero3 = "shoal"
    fused_adding: bool = False  # products add to the gradients of earlier micro-batches themselves
    hide: tuple[str, ...] = ()  # of tp, ep and pp: whose messages computing hides
    failures: Failures | None = None  # what they leave of the time is predicted, too
    slow: SlowWorkers = ()
    fold_ep: bool = False  # ranks of tp hold whole experts, as those of ep do
    program: ModelProgram = FUSED  # what runs of the model


class ResolvedStep(NamedTuple):
    """How a strategy divides a step."""

    layout: Layout
    split: Split
    microbatches: int
    shape: PipelineShape

    def fixed_s(self, device: Device) -> float:
        """The host's time that no kernel hides; one that was measured launches beside kernels."""
        if self.split.program.kernels in device.launches_s:
            return 0.0
        return device.step_s + self.microbatches * self.shape.chunks * device.microbatch_s


class Predictor:
    """Predicts strategies for one workload on one cluster."""

    def __init__(self, workload: Workload, cluster: Cluster, order: tuple[str, ...] = SHOAL_ORDER):
        self.workload = workload
        self.cluster = cluster
        self._order = order
        self._pricers: dict[tuple[int, float | None], ReplicaPricer] = {}
        self._asked: dict[tuple[object, ...], tuple[ReplicaPrice, SyncQuestion]] = {}
        self._held: dict[tuple[Stage, int, int], tuple[TensorLayout | None, float]] = {}
        self._flops: dict[tuple[int, bool], float] = {}

    def pricer(self, workers: int, program: ModelProgram = FUSED) -> ReplicaPricer:
        """A pricer for the device that each of so many workers has."""
        cluster = self.cluster
        device = cluster.device_of(workers)
        rate = device.update_bytes_per_s
        if device.fused_update_bytes_per_s is not None:  # Megatron-LM's update is a pass
            known = {"foreach": rate, "fused": device.fused_update_bytes_per_s}
            rate = None if program.kernels == "fused" else known[program.update]
        crowd = min(workers, cluster.node.devices) if cluster.node.crowded else 0
        key = crowd, rate
        if key not in self._pricers:
            device = replace(device, update_bytes_per_s=rate)
            cluster = replace(cluster, device=device)
            self._pricers[key] = ReplicaPricer(self.workload, cluster, self._order)
        return self._pricers[key]

    def _model_flops(self, settings: PlanSettings) -> float:
        key = (settings.batch, settings.flash_attention)
        if key not in self._flops:
            # what kernels do: papers also count what those of causal attention skip
            split = Split(settings.batch, flash_attention=settings.flash_attention)
            computed = 0.0
            for index, run in enumerate(self.workload.runs):
                cost = self.workload.cost(index, split)
                kernels = (*cost.forward, *cost.backward_input, *cost.backward_weight)
                computed += run.count * sum(kernel.flops for kernel in kernels)
            self._flops[key] = min(self.workload.model_flops(*key), computed)
        return self._flops[key]

    def question(
        self,
        pricer: ReplicaPricer,
        resolved: ResolvedStep,
        replica: ReplicaPrice,
        settings: PlanSettings,
    ) -> SyncQuestion:
        """What the replicas of a step have to agree on."""
        layout, stages = resolved.layout, replica.stages
        held, untrained = self._tensors(stages.fullest, resolved.split)
        precision = self.workload.precision
        return SyncQuestion(
            pricer.network,
            group_of(layout, "dp", self._order),
            stages.parameters,
            precision,
            replica.seconds,
            stages.backward_s if settings.overlap else 0.0,
            resolved.microbatches,
            layout.workers,
            held,
            stages.layer_parameters,
            untrained * precision.parameter_bytes,
            is_stage=layout.pp > 1,
            adds_up=layout.ep > 1,
            adjacent_parameters=stages.adjacent_parameters,
            largest_tensor=stages.largest_tensor,
            meetings=resolved.microbatches * stages.meetings,
            zero3_of=settings.zero3_of,
            row_tables=self.workload.row_tables,
            samples=resolved.split.microbatch,
        )

    def _tensors(self, stage: Stage, split: Split) -> tuple[TensorLayout | None, float]:
        """The tensors of the fullest device, where the model is known; untrained numbers."""
        key = (stage, split.tp, split.ep)
        if key not in self._held:
            found = self.workload.tensors(stage, split)
            width = self.workload.precision.gradient_bytes
            self._held[key] = None, 0.0
            if found is not None and found.shapes:
                layout = TensorLayout(found.shapes, found.units, width, found.cast)
                self._held[key] = layout, found.untrained
        return self._held[key]

    def predict(
        self,
        strategy: Strategy,
        workers: int,
        settings: PlanSettings,
        layout: Layout | None = None,
    ) -> Prediction:
        """`layout` is that of the strategy, where it is known."""
        layout, text = layout or strategy.layout(workers), str(strategy)
        term = strategy.sync_for(layout.replicas)
        resolved = _resolve(self.workload, strategy, (layout, term), settings)
        pricer = self.pricer(workers, settings.program)
        key = (resolved, settings.overlap, settings.zero3_of)
        if key not in self._asked:  # all ways to agree ask the same
            replica = pricer.price(*resolved)
            self._asked[key] = (replica, self.question(pricer, resolved, replica, settings))
        replica, question = self._asked[key]
        sync = price_of(term, question)
        fixed_s = resolved.fixed_s(pricer.cluster.device)
        fixed = (Part("fixed", fixed_s, "launch"),) if fixed_s else ()
        parts = (*replica.parts, *sync.parts, *fixed)
        if settings.slow:
            more_s = self._slow_s(pricer, resolved, term, settings)
            parts += (Part("slow workers", more_s, "the slowest worker"),)
        turns = batches_in_turns(layout, term)
        if turns > 1:  # each step of all replicas is so many batches
            parts = tuple(part._replace(seconds=part.seconds / turns) for part in parts)
        step_s = sum(part.seconds for part in parts)
        device = pricer.cluster.device
        kind = kind_of(self.workload, device)
        low, high = range_of(device, kind, workers)
        seen = what_was_seen(device, kind, workers)
        found = Prediction(
            strategy=text,
            workers=workers,
            cluster=self.cluster.name,
            batch=settings.batch,
            step_s=step_s,
            low_s=low * (step_s - sync.spread_s[0]),
            high_s=high * (step_s + sync.spread_s[1]),
            parts=parts,
            memory=_with_activations(sync.memory, replica, resolved, question),
            memory_limit_bytes=pricer.cluster.device.memory_bytes,
            host_limit_bytes=self.cluster.host_bytes_of(workers),
            samples_per_s=settings.batch / step_s,
            mfu=self._model_flops(settings) / (pricer.peak_flops * workers * step_s),
            convergence=sync.convergence,
            notes=(seen,) if seen else (),
            microbatches=resolved.microbatches,
        )
        if settings.failures is None:
            return found
        way = None
        if (elastic := elastic_term(strategy, workers, self.cluster.node.devices)) is not None:
            plain = replace(settings, failures=None)
            other = self.predict(replace(strategy, sync=elastic), workers, plain, layout)
            way = (elastic, other) if other.fits else None
        asked = (settings.failures, self.cluster, self._checkpoint_bytes)
        return replace(found, goodput=goodput_of(*asked, found, way))

    def _slow_s(
        self, pricer: ReplicaPricer, resolved: ResolvedStep, term: SyncTerm, settings: PlanSettings
    ) -> float:
        """How much longer a step is than where no worker is slow."""
        even, question = self._asked[resolved, settings.overlap, settings.zero3_of]
        layout, _, microbatches, shape = resolved
        parts = price_of(term, question).parts
        behind_s = resolved.fixed_s(pricer.cluster.device)  # what a worker does behind its passes
        behind_s += sum(part.seconds for part in parts if part[::2] == ("update", "memory"))
        slow = slow_replicas(even, layout, microbatches, shape, settings.slow, self._order)
        late_s = [one.price.seconds - even.seconds + (one.factor - 1) * behind_s for one in slow]
        more_s = 0.0
        if term.lockstep or term.meets_every:  # all wait for the slowest
            more_s = max(late_s, default=0.0)
            slowest = max([even, *(one.price for one in slow)], key=lambda one: one.seconds)
            question = self.question(pricer, resolved, slowest, settings)
        slower = price_of(term, replace(question, late_s=tuple(late_s))).parts
        return more_s + sum(p.seconds for p in slower) - sum(p.seconds for p in parts)

    @cached_property
    def _checkpoint_bytes(self) -> float:
        """Of the whole model with the state of its optimizer."""
        held = self.workload.precision
        each = held.parameter_bytes + held.master_bytes + held.state_bytes
        rows = sum(table.bytes for table in self.workload.row_tables)
        return parameters_of(self.workload) * each + rows


def _with_activations(
    memory: DeviceMemory, replica: ReplicaPrice, resolved: ResolvedStep, question: SyncQuestion
) -> DeviceMemory:
    """Gradients come while activations go, unless a buffer or an earlier micro-batch has them.

    A foreach update has the square roots of all second moments at once, after backward.
    """
    kept = memory.activations + replica.activation_bytes
    buffers = memory.buffers + replica.stages.passing_bytes
    program = resolved.split.program
    if program.kernels == "fused" or question.on_cores:
        return memory._replace(activations=kept, buffers=buffers)
    if question.replicas == 1 and resolved.microbatches == 1:
        kept = max(0.0, kept - memory.gradients)
    if program.update == "foreach" and question.precision.state_bytes > 4 and not memory.host:
        buffers = max(buffers, question.parameter_bytes - kept)
    return memory._replace(activations=kept, buffers=buffers)


def predict(
    workload: Workload,
    cluster: Cluster,
    strategy: Strategy | str,
    workers: int,
    settings: PlanSettings,
    order: tuple[str, ...] = SHOAL_ORDER,
) -> Prediction:
    """One prediction; a `Predictor` is faster for many."""
    predictor = Predictor(workload, cluster.of_size(workers), order)
    return predictor.predict(as_strategy(strategy), workers, settings)


def resolve_step(
    workload: Workload, strategy: Strategy, workers: int, settings: PlanSettings
) -> ResolvedStep:
    layout = strategy.layout(workers)
    return _resolve(workload, strategy, (layout, strategy.sync_for(layout.replicas)), settings)


def _resolve(
    workload: Workload, strategy: Strategy, chosen: tuple[Layout, SyncTerm], settings: PlanSettings
) -> ResolvedStep:
    layout, term = chosen
    is_by_operation = settings.recompute not in ("none", "full")
    if is_by_operation and not workload.limits.selective_recompute:
        raise BadInput(
            f"--recompute {settings.recompute} is for transformers by name or sizes: the trace of "
            f"{workload.name} does not show what each operation keeps; full says it of all"
        )
    shares_rows = term.has_servers and layout.replicas == layout.workers
    if workload.row_tables and layout.workers > 1 and not shares_rows:
        raise BadInput(f"shoal.Embedding trains on several workers under ps, not under {strategy}")
    for axis in settings.hide:
        if getattr(strategy, axis) is None:
            raise BadInput(f"--hide {axis}: {strategy} has no {axis}")
    turns = batches_in_turns(layout, term)
    microbatch, microbatches = _micro_batches(workload, strategy, layout, settings, turns)
    in_notation = False
    is_sharded = layout.replicas > 1 and getattr(term, "stage", 1) > 1  # each is reduced
    shape = PipelineShape(adds=not (settings.fused_adding or is_sharded))
    if (pp := strategy.pp) is not None:
        in_notation = pp.recompute
        chunks = schedule(pp.schedule).num_chunks(pp.chunks)
        balance = "even" if settings.even_stages else pp.balance
        scatter = settings.scatter_sends and strategy.tp is not None and not strategy.tp.sequence
        hides = "pp" in settings.hide
        shape = PipelineShape(pp.schedule, chunks, balance, scatter, shape.adds, hides)
    split = Split(
        microbatch,
        layout.tp,
        strategy.tp is not None and strategy.tp.sequence,
        layout.cp,
        layout.ep,
        "full" if in_notation else settings.recompute,
        settings.flash_attention,
        settings.hide,
        settings.fold_ep,
        settings.program,
    )
    return ResolvedStep(layout, split, microbatches, shape)


def folded(strategy: Strategy) -> Strategy:
    """The ep that is left where the one given counts the ranks of tp, too."""
    ep, tp = strategy.ep, strategy.tp
    if ep is None or tp is None or ep.size % tp.size or ep.size == tp.size:
        raise BadInput(f"--fold-ep: {strategy} has no ep that is a multiple of its tp")
    return replace(strategy, ep=replace(ep, size=ep.size // tp.size))


def batches_in_turns(layout: Layout, term: SyncTerm) -> int:
    """Global batches that all replicas together compute in a step of each."""
    return layout.replicas if term.batches is Batches.IN_TURNS else 1


def _micro_batches(
    workload: Workload, strategy: Strategy, layout: Layout, settings: PlanSettings, turns: int
) -> tuple[int, int]:
    """Samples of a micro-batch, and how many micro-batches a replica has in a step."""
    of_replica = -(-turns * settings.batch // (layout.replicas * layout.ep))
    if settings.microbatch is not None:
        if settings.microbatch > of_replica:
            raise BadInput(
                f"a micro-batch of {settings.microbatch} samples is larger than the "
                f"{of_replica} of a replica"
            )
        return settings.microbatch, -(-of_replica // settings.microbatch)
    # as the runtime chooses: those of pp, or `accumulate` of the script, or two for each stage
    pp, count = strategy.pp, workload.accumulate
    if pp is not None and pp.size > 1:
        if pp.microbatches is not None:
            count = pp.microbatches
        elif count == 1:
            count = 1 if pp.schedule == "inter-op" else 2 * pp.size
    count = min(count, of_replica)
    return -(-of_replica // count), count
