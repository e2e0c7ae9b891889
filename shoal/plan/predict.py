"""How long a step takes and how much memory it needs: one strategy on one cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.cluster.cluster import Cluster
from shoal.errors import BadInput
from shoal.plan.prediction import DeviceMemory, Prediction
from shoal.plan.rank_order import IN_SHOALS_ORDER, RankOrder
from shoal.plan.step_price import PipelineShape, ReplicaPrice, ReplicaPricer
from shoal.plan.sync_price import all_reduce as _all_reduce  # noqa: F401  registers its prices
from shoal.plan.sync_price.base import PRICERS, Agreement
from shoal.plan.workload import Recompute, Split, Workload
from shoal.strategy.strategy import Layout, Strategy, as_strategy


@dataclass(frozen=True)
class StepSettings:
    """What a step has beside its strategy."""

    batch: int  # samples of the global batch
    microbatch: int | None = None  # samples; None: as `microbatches` of pp or 1 micro-batch says
    recompute: Recompute = "none"
    flash_attention: bool = False
    order: RankOrder = IN_SHOALS_ORDER


def predict(
    workload: Workload,
    cluster: Cluster,
    strategy: Strategy | str,
    workers: int,
    settings: StepSettings,
) -> Prediction:
    chosen = as_strategy(strategy)
    layout = chosen.layout(workers)
    microbatch, microbatches = _micro_batches(chosen, layout, settings)
    split = _split(chosen, layout, settings, microbatch)
    pricer = ReplicaPricer(workload, cluster.of_size(workers), layout, settings.order)
    replica = pricer.price(split, microbatches, _shape(chosen))
    term = chosen.sync_for(layout.replicas)
    sync = PRICERS[term.name](term, _question(pricer, replica, microbatches, workers))
    parts = (*replica.parts, *sync.parts)
    step_s = sum(part.seconds for part in parts)
    flops = workload.model_flops(settings.batch)
    peak = cluster.device.flops_of(workload.precision.compute) * workers
    return Prediction(
        strategy=str(chosen),
        workers=workers,
        cluster=cluster.name,
        batch=settings.batch,
        step_s=step_s,
        low_s=step_s,
        high_s=step_s,
        parts=parts,
        memory=_with_activations(sync.memory, pricer, split, microbatches),
        memory_limit_bytes=cluster.device.memory_bytes,
        samples_per_s=settings.batch / step_s,
        mfu=flops / (peak * step_s),
        convergence=sync.convergence,
    )


def _micro_batches(strategy: Strategy, layout: Layout, settings: StepSettings) -> tuple[int, int]:
    """Samples of a micro-batch, and how many micro-batches a replica has in a step."""
    of_replica = max(1, settings.batch // (layout.replicas * layout.ep))
    if settings.microbatch is not None:
        if settings.microbatch > of_replica:
            raise BadInput(
                f"a micro-batch of {settings.microbatch} samples is larger than the "
                f"{of_replica} of a replica"
            )
        return settings.microbatch, -(-of_replica // settings.microbatch)
    count = layout.pp
    if strategy.pp is not None and strategy.pp.microbatches is not None:
        count = strategy.pp.microbatches
    count = min(count, of_replica)
    return -(-of_replica // count), count


def _split(strategy: Strategy, layout: Layout, settings: StepSettings, microbatch: int) -> Split:
    recompute = settings.recompute
    if strategy.pp is not None and strategy.pp.recompute:
        recompute = "full"
    return Split(
        microbatch,
        layout.tp,
        strategy.tp is not None and strategy.tp.sequence,
        layout.cp,
        layout.ep,
        recompute,
        settings.flash_attention,
    )


def _shape(strategy: Strategy) -> PipelineShape:
    if strategy.pp is None:
        return PipelineShape()
    return PipelineShape(strategy.pp.schedule, strategy.pp.chunks or 1)


def _question(
    pricer: ReplicaPricer, replica: ReplicaPrice, microbatches: int, workers: int
) -> Agreement:
    return Agreement(
        pricer.cluster,
        pricer.group("dp"),
        replica.parameters,
        pricer.workload.precision,
        replica.seconds,
        replica.backward_s,
        microbatches,
        workers,
    )


def _with_activations(
    memory: DeviceMemory, pricer: ReplicaPricer, split: Split, microbatches: int
) -> DeviceMemory:
    """The first stage keeps the activations of as many micro-batches as there are stages."""
    runs = pricer.workload.runs
    costs = [pricer.workload.cost(run, split) for run in range(len(runs))]
    whole = sum(run.count * cost.activation_bytes for run, cost in zip(runs, costs, strict=True))
    stages = pricer.layout.pp
    return replace(memory, activations=whole / stages * min(stages, microbatches))
