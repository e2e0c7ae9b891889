"""What a search tries: layouts of the workers, and variants of each.

    layout     replicas x tp x pp x cp x ep = workers, as far as the model can be split
    shape      a layout, the samples of a micro-batch, and sequence parallelism beside tp
    variant    a shape with a way to synchronize, a schedule of the pipeline, and recompute

Left out because another one is never slower and never larger: gpipe, inter-op and bfs (1f1b and
interleaved have their bubble and keep fewer activations), gossip over a complete graph (it is ddp
that sends everything to all), and recompute of what fits without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings
from shoal.plan.workloads import Recompute, Workload
from shoal.strategy.base import Batches, SyncTerm
from shoal.strategy.split_terms import Cp, Ep, Pp, Tp
from shoal.strategy.strategy import Layout, Strategy, as_strategy
from shoal.strategy.sync_terms import Single
from shoal.strategy.terms import TERMS

_STEP_BETWEEN_SIZES = 1.5  # of micro-batches: sizes that are closer are not worth a try
_LEFT_OUT = ('gossip(graph="complete")',)
MAX_CHUNKS = 8


class Shape(NamedTuple):
    """How workers and samples are divided, before a schedule and a way to agree are chosen."""

    layout: Layout
    microbatch: int  # samples
    microbatches: int  # of a replica in a step
    sequence: bool = False
    is_default: bool = False  # the micro-batches that the script has anyway


class Candidate(NamedTuple):
    strategy: Strategy
    settings: PlanSettings


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def layouts(workload: Workload, workers: int, batch: int) -> Iterator[Layout]:
    """Every division of the workers that the model and the batch allow."""
    limits = workload.limits
    stages = limits.stages or sum(run.count for run in workload.runs)
    sizes = _sizes(workers, limits.tp)
    if limits.tp_sizes is not None:
        sizes = [size for size in divisors(workers) if size == 1 or size in limits.tp_sizes]
    for tp in sizes:
        for cp in _sizes(workers // tp, (limits.cp,)):
            for ep in _sizes(workers // (tp * cp), (limits.ep,)):
                left = workers // (tp * cp * ep)
                for pp in divisors(left):
                    if pp <= stages and left // pp * ep <= batch:
                        yield Layout(left // pp, tp, pp, ep, cp)


def _sizes(workers: int, numbers: Sequence[int]) -> list[int]:
    return [size for size in divisors(workers) if all(n % size == 0 for n in numbers)]


def shapes(layout: Layout, workload: Workload, settings: PlanSettings) -> Iterator[Shape]:
    """Micro-batches that divide a replica's samples; the given one only, where it is given."""
    samples = -(-settings.batch // (layout.replicas * layout.ep))
    given = settings.microbatch
    sizes = _thinned(divisors(samples)) if given is None else [given]
    may_divide_positions = layout.tp > 1 and workload.limits.sequence_parallel
    for size in (size for size in sizes if size <= samples):
        count = -(-samples // size)
        is_default = count == min(samples, workload.accumulate)
        for sequence in (False, True) if may_divide_positions else (False,):
            yield Shape(layout, size, count, sequence, is_default)


def _thinned(sizes: Sequence[int]) -> list[int]:
    """Each at least half as large again as the one before; the first and the last stay."""
    kept = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if size * _STEP_BETWEEN_SIZES <= kept[-1]:
            kept.append(size)
    return kept if kept[-1] == sizes[0] else [*kept, sizes[0]]


def pipelines(shape: Shape, layers: int) -> Iterator[tuple[str, int]]:
    """Schedules and chunks; interleaved needs a micro-batch for each stage and whole layers."""
    yield "1f1b", 1
    stages = shape.layout.pp
    if stages == 1:
        return
    yield "zb-h1", 1
    yield "zb-h2", 1
    chunks = 2
    while chunks * stages <= layers and chunks <= MAX_CHUNKS and shape.microbatches >= stages:
        yield "interleaved", chunks
        chunks *= 2


def candidate(
    shape: Shape,
    sync: SyncTerm | None,
    pipeline: tuple[str, int],
    recompute: Recompute,
    settings: PlanSettings,
) -> Candidate:
    """What pp can say is said in the notation; the rest are settings."""
    in_notation = shape.layout.pp > 1
    strategy = _strategy(shape, sync, *pipeline, in_notation and recompute == "full")
    microbatch = None if in_notation or shape.is_default else shape.microbatch
    beside = "none" if in_notation and recompute == "full" else recompute
    hide = tuple(axis for axis in settings.hide if getattr(strategy, axis) is not None)
    return Candidate(strategy, _settings(settings, microbatch, beside, hide))


@lru_cache(maxsize=1000)
def _settings(
    settings: PlanSettings, microbatch: int | None, recompute: Recompute, hide: tuple[str, ...]
) -> PlanSettings:
    return replace(settings, microbatch=microbatch, recompute=recompute, hide=hide)


@lru_cache(maxsize=1000)
def _strategy(
    shape: Shape, sync: SyncTerm | None, schedule: str, chunks: int, recompute: bool
) -> Strategy:
    layout = shape.layout
    pipeline = {"schedule": schedule, "microbatches": shape.microbatches, "recompute": recompute}
    return Strategy(
        sync,
        _term(Tp, layout.tp, sequence=shape.sequence),
        _term(Pp, layout.pp, **pipeline, chunks=chunks if chunks > 1 else None),
        _term(Ep, layout.ep),
        _term(Cp, layout.cp),
    )


@lru_cache(maxsize=10_000)
def _term(kind: Callable[..., Any], size: int, **options: Any) -> Any:
    """A term that splits replicas; None where it splits nothing."""
    return kind(size, **options) if size > 1 else None


@lru_cache(maxsize=1)
def _all_syncs() -> tuple[SyncTerm, ...]:
    """Every way to agree, with the options that `shoal compare` tries."""
    texts = [text for term in TERMS.values() if term.role == "sync" for text in term.compared]
    texts += ['ps(placement="workers")', *(f"zero({n}, offload=True)" for n in (1, 2, 3))]
    terms = [as_strategy(text).sync for text in texts]
    return tuple(
        term
        for term in terms
        if term is not None
        and term.collective_algorithm is None
        and term.batches is not Batches.WHOLE_DATASET
        and str(term) not in _LEFT_OUT
    )


@lru_cache(maxsize=10_000)
def syncs(layout: Layout, on_one_host: bool, equals_single: bool) -> tuple[SyncTerm | None, ...]:
    """The ways to agree that run on this layout and give, or do not give, one device's result."""
    alone: list[SyncTerm | None] = []
    if layout.replicas == 1 and equals_single:
        splits = layout.tp * layout.pp * layout.ep * layout.cp
        alone = [None if splits > 1 else Single()]
    terms = (
        term
        for term in _all_syncs()
        if term.equals_single == equals_single
        and (layout.replicas > 1 or term.offload)
        and (on_one_host or not term.needs_one_host)
        and _runs(term, layout)
    )
    return (*alone, *terms)


def _runs(sync: SyncTerm, layout: Layout) -> bool:
    """Whether the strategy layer accepts the way to agree on this layout."""
    try:
        strategy = _strategy(Shape(layout, 1, 1), sync, "1f1b", 1, False)
        strategy.require_built()
        strategy.layout(layout.replicas * layout.tp * layout.pp * layout.ep * layout.cp)
    except BadInput:
        return False
    return True
