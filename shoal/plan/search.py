"""Every valid strategy for a workload on a cluster, within memory; `ranking` puts them in order.

Branch and bound, so that the answer is that of pricing everything. The time that the devices of a
shape compute and send inside a replica is a lower bound for all its variants; shapes are taken in
its order, and the search ends where the bound is above the last of the best layouts found.
Recompute and offload are tried only where a variant does not fit without.

The order of priced strategies: by predicted time, up to what predictions can tell.

Of those that are within 2% of the fastest, the plainest is the first: the fewest splits of a
replica, and ddp before zero before other ways to agree.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shoal.cluster import Cluster
from shoal.errors import BadInput
from shoal.plan.candidates import (
    Candidate,
    Shape,
    candidate,
    divisors,
    layouts,
    pipelines,
    shapes,
    syncs,
)
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.workloads import Recompute, Workload
from shoal.runtime.wording import counted
from shoal.strategy.base import SyncTerm
from shoal.strategy.strategy import Layout, Strategy

AS_FAST = 1.02  # predictions that are closer than this are no reason to prefer one
NEAR_MISS = 0.05  # of the memory: what is larger by less may fit after all
_EQUAL = 1.001  # times closer than this are the same
_KNOWN = ("single", "ddp", "zero")  # ways to agree, the plainest first


@dataclass(frozen=True)
class Priced:
    """A strategy with its prediction, and the others of its layout that are never better."""

    candidate: Candidate
    layout: Layout
    prediction: Prediction
    merged: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.prediction.effective_s


def merge(found: Iterable[Priced]) -> list[Priced]:
    """Ranked; of one layout, what is neither faster nor smaller than another joins that one."""
    kept: dict[Layout, list[Priced]] = {}
    for one in plainest_first(found):
        same = kept.setdefault(one.layout, [])
        needs = one.prediction.memory.total
        smaller = [n for n, other in enumerate(same) if other.prediction.memory.total <= needs]
        if not smaller:
            same.append(one)
        else:
            place = smaller[0]
            names = (*same[place].merged, one.prediction.strategy)
            same[place] = replace(same[place], merged=names)
    return plainest_first(one for group in kept.values() for one in group)


def plainest_first(found: Iterable[Priced]) -> list[Priced]:
    """By time, but for the plainest of those that are as fast as the fastest."""
    ordered = sorted(found, key=order)
    if not ordered:
        return []
    fastest_s = min(one.seconds for one in ordered)
    equal = [one for one in ordered if one.seconds <= fastest_s * AS_FAST]
    first = min(equal, key=lambda one: (_plainness(one), one.seconds))
    return [first, *(one for one in ordered if one is not first)]


def _plainness(one: Priced) -> tuple[int, int]:
    strategy = one.candidate.strategy
    name = strategy.sync.name if strategy.sync is not None else _KNOWN[0]
    known = _KNOWN.index(name) if name in _KNOWN else len(_KNOWN)
    return len(strategy.splits), known


Order = tuple[float, tuple[int, int], float, int, str]


def order(one: Priced) -> Order:
    """Equal times, up to a thousandth: the plainest first, then the smaller and the shorter."""
    time = round(math.log(max(one.seconds, 1e-12)) / math.log(_EQUAL))
    text = one.prediction.strategy
    return time, _plainness(one), one.prediction.memory.total, len(text), text


def _needs(one: Priced) -> float:
    return one.prediction.memory.total


def _too_large(one: Priced) -> tuple[bool, Order]:
    """Near misses first, then by time."""
    prediction = one.prediction
    limit = (1 + NEAR_MISS) * prediction.memory_limit_bytes
    return prediction.memory.total > limit, order(one)


OnPriced = Callable[[int, int], None]  # shapes done, and of how many
_INSIDE_REPLICA = ("forward", "backward", "tp", "cp", "ep")
_LADDER: tuple[Recompute, ...] = ("none", "selective", "full")
_DOUBLINGS = 12  # how far a search for more workers goes


@dataclass(frozen=True)
class SearchOptions:
    """What is searched. `settings.microbatch` of None: every micro-batch is tried."""

    settings: PlanSettings
    top: int = 10
    include_async: bool = False
    explain: Strategy | None = None  # why it is not the first
    notation_only: bool = False  # only what `-s` can say: no recompute or micro-batches without pp


@dataclass(frozen=True)
class SearchResult:
    ranked: tuple[Priced, ...]  # those that fit and equal one device, the best first
    too_large: tuple[Priced, ...]  # faster than the first, and larger than the memory
    asynchronous: tuple[Priced, ...]  # not the single-device result
    least: Priced | None  # the least memory, where nothing fits
    least_workers: Priced | None  # where nothing fits: the fewest workers that do
    variants: int  # that the answer is about
    priced: int
    asked: Priced | None = None  # the one to be explained


def search(
    workload: Workload,
    cluster: Cluster,
    workers: int,
    options: SearchOptions,
    on_priced: OnPriced = lambda done, total: None,
) -> SearchResult:
    """All valid strategies; none of them within memory leaves `ranked` empty."""
    run = _Search(workload, cluster.of_size(workers), workers, options)
    with _no_collection():
        exact = run.find(True, on_priced)
        relaxed = run.find(False, lambda done, total: None) if options.include_async else _Found()
    if not exact.fits and not exact.larger:
        why = run.first_refusal or "the batch has fewer samples than there are replicas"
        raise BadInput(
            f"no strategy can be priced for {workload.name} on {counted(workers, 'worker')}: {why}"
        )
    priced = run.priced
    ranked = merge(exact.fits.values())[: options.top]
    best_s = ranked[0].seconds if ranked else 0.0
    faster = sorted((one for one in exact.larger.values() if one.seconds < best_s), key=_too_large)
    return SearchResult(
        tuple(ranked),
        tuple(faster[:3]),
        tuple(merge(relaxed.fits.values())[: options.top]),
        None if ranked else run.least(workers),
        None if ranked else run.fewest_workers(),
        run.variants,
        priced,
        None if options.explain is None else run.best_of(options.explain),
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """A search makes many small objects and no cycles: looking for these takes an eighth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Found:
    """The best of every layout and way to synchronize."""

    def __init__(self) -> None:
        self.fits: dict[tuple[Layout, SyncTerm | None], Priced] = {}
        self.larger: dict[Layout, Priced] = {}
        self._best: dict[Layout, float] = {}
        self.limit_s = math.inf  # slower layouts are not among the best ones

    def add(self, found: Priced, top: int) -> None:
        layout = found.layout
        if not found.prediction.fits:
            if layout not in self.larger or order(found) < order(self.larger[layout]):
                self.larger[layout] = found
            return
        key = (layout, found.candidate.strategy.sync)
        if key not in self.fits or order(found) < order(self.fits[key]):
            self.fits[key] = found
        if found.seconds < self._best.get(layout, math.inf):
            self._best[layout] = found.seconds
            best = heapq.nsmallest(top, self._best.values())
            self.limit_s = best[-1] * AS_FAST if len(best) == top else math.inf


class _Search:
    def __init__(
        self, workload: Workload, cluster: Cluster, workers: int, options: SearchOptions
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.workers = workers
        self.on_one_host = workers <= cluster.node.devices
        self.options = options
        self.predictor = Predictor(workload, cluster)
        self.layers = sum(run.count for run in workload.runs)
        self.variants = 0
        self.priced = 0
        self.first_refusal = ""

    def find(self, equals_single: bool, on_priced: OnPriced) -> _Found:
        found = _Found()
        bounded = self._bounded(equals_single)
        for done, (bound_s, _, shape) in enumerate(bounded):
            on_priced(done, len(bounded))
            if bound_s > found.limit_s:
                break
            fitting = set()  # stages of zero, without recompute and offload
            for sync in syncs(shape.layout, self.on_one_host, equals_single):
                stage = getattr(sync, "stage", 0) if shape.layout.replicas > 1 else 0
                offload = sync is not None and sync.offload
                if not (offload and stage in fitting) and self._try(found, shape, sync):
                    fitting.add(stage)
        on_priced(len(bounded), len(bounded))
        return found

    def _bounded(self, equals_single: bool) -> list[tuple[float, int, Shape]]:
        """Every shape with the time that none of its variants is below, in its order."""
        bounded = []
        for number, shape in enumerate(self._shapes()):
            ways = syncs(shape.layout, self.on_one_host, equals_single)
            self.variants += len(ways) * len(list(pipelines(shape, self.layers))) * len(_LADDER)
            tried = (self._price(shape, way, ("1f1b", 1), "none") for way in ways)
            if (first := next(filter(None, tried), None)) is not None:
                parts = first.prediction.parts
                inside = sum(part.seconds for part in parts if part.name in _INSIDE_REPLICA)
                bounded.append((inside, number, shape))
        return sorted(bounded)

    def _shapes(self) -> Iterator[Shape]:
        settings = self.options.settings
        for layout in layouts(self.workload, self.workers, settings.batch):
            chosen = settings
            if self.options.notation_only and layout.pp == 1:
                samples = -(-settings.batch // (layout.replicas * layout.ep))
                count = min(samples, self.workload.accumulate)
                chosen = replace(settings, microbatch=-(-samples // count))
            yield from shapes(layout, self.workload, chosen)

    def _try(self, found: _Found, shape: Shape, sync: SyncTerm | None) -> bool:
        """1f1b first: no schedule keeps fewer activations, or has less than no bubble.

        True: without recompute it fits.
        """
        first, *others = pipelines(shape, self.layers)
        best = self._climb(found, shape, sync, first)
        if best is None:
            return False
        seconds = {part.name: part.seconds for part in best.prediction.parts}
        filled_s = sum(seconds.get(name, 0.0) for name in ("bubble", "pp", "recompute"))
        if best.prediction.step_s - filled_s <= found.limit_s:
            for pipeline in others:
                self._climb(found, shape, sync, pipeline)
        return "recompute" not in seconds

    def _climb(
        self, found: _Found, shape: Shape, sync: SyncTerm | None, pipeline: tuple[str, int]
    ) -> Priced | None:
        """As little recompute as fits; None where nothing does."""
        for recompute in self._ladder(shape):
            priced = self._price(shape, sync, pipeline, recompute)
            if priced is None:
                return None
            found.add(priced, self.options.top)
            memory = priced.prediction.memory
            limit = priced.prediction.memory_limit_bytes
            if memory.total <= limit:
                return priced
            if memory.total - memory.activations > limit:
                return None
        return None

    def _ladder(self, shape: Shape) -> Iterable[Recompute]:
        if not self.options.notation_only:
            knows = self.workload.limits.selective_recompute
            return [one for one in _LADDER if knows or one != "selective"]
        return ("none", "full") if shape.layout.pp > 1 else ("none",)

    def _price(
        self,
        shape: Shape,
        sync: SyncTerm | None,
        pipeline: tuple[str, int],
        recompute: Recompute,
        workers: int | None = None,
    ) -> Priced | None:
        tried = candidate(shape, sync, pipeline, recompute, self.options.settings)
        self.priced += 1
        try:
            prediction = self.predictor.predict(
                tried.strategy, workers or self.workers, tried.settings, shape.layout
            )
        except BadInput as error:
            self.first_refusal = self.first_refusal or str(error)
            return None
        return Priced(tried, shape.layout, prediction)

    def best_of(self, strategy: Strategy) -> Priced:
        """The strategy with the micro-batch and recompute that suit it; BadInput: none does."""
        layout = strategy.layout(self.workers)
        settings = self.options.settings
        hide = tuple(axis for axis in settings.hide if getattr(strategy, axis) is not None)
        samples = max(1, settings.batch // (layout.replicas * layout.ep))
        sizes = [settings.microbatch] if settings.microbatch else [None, *divisors(samples)]
        shape = Shape(layout, 1, 1)
        found = []
        for size in sizes:
            for recompute in self._ladder(shape):
                tried = replace(settings, microbatch=size, recompute=recompute, hide=hide)
                one = self.predictor.predict(strategy, self.workers, tried, layout)
                found.append(Priced(Candidate(strategy, tried), layout, one))
        fitting = [one for one in found if one.prediction.fits]
        return min(fitting, key=order) if fitting else min(found, key=_needs)

    def least(self, workers: int) -> Priced | None:
        """The strategy that needs the least memory on so many workers."""
        settings = self.options.settings
        found = []
        for layout in layouts(self.workload, workers, settings.batch):
            tried = list(shapes(layout, self.workload, settings))
            if not tried:
                continue
            shape = min(reversed(tried), key=lambda shape: shape.microbatch)
            recompute = tuple(self._ladder(shape))[-1]
            for sync in syncs(layout, workers <= self.cluster.node.devices, True):
                if layout.replicas == 1 or (sync is not None and sync.shards_state):
                    found.append(self._price(shape, sync, ("1f1b", 1), recompute, workers))
        priced = [one for one in found if one is not None]
        return min(priced, key=lambda one: one.prediction.memory.total, default=None)

    def fewest_workers(self) -> Priced | None:
        """Twice as many workers, and again, until something fits."""
        workers = self.workers
        for _ in range(_DOUBLINGS):
            workers *= 2
            self.cluster = self.cluster.of_size(workers)
            self.predictor = Predictor(self.workload, self.cluster)
            least = self.least(workers)
            if least is not None and least.prediction.fits:
                return least
        return None
