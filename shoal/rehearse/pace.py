"""How long virtual workers compute: as the planner prices the layers of the script's model.

The gradients of a backward are final one after the other. A bucket is handed over at the moment at
which so much of the model's parameters is done; at the measured one where passes were measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.cluster import Cluster
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, Predictor, resolve_step
from shoal.plan.step.slow_workers import Unevenness
from shoal.plan.step.step_price import weights_of
from shoal.plan.sync_price.servers import Serving
from shoal.plan.workloads import Workload
from shoal.rehearse.virtual_time import VirtualTime
from shoal.runtime.trace import COMPUTE, Recorder
from shoal.server.model.served_model import ServedModel
from shoal.server.process.model_host import Slowness
from shoal.strategy.strategy import Strategy
from shoal.train.step.step import Step


@dataclass(frozen=True)
class WorkerTimes:
    """Seconds of one worker alone: for `rows` samples by stage, and for an update."""

    rows: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]  # the whole backward
    weight_s: tuple[float, ...]  # the part of it that makes the gradients of weights
    update_s: float
    apply_s: float = 0.0  # of a server, for an update of its shard
    ready: Sequence[tuple[float, float]] = ()  # parameters that are done, and backward then

    def share_of_backward(self, done: float) -> float:
        """When so much of the parameters is done; both are shares."""
        known = np.array([(0.0, 0.0), *(self.ready or [(1.0, 1.0)])])
        return float(np.interp(done, known[:, 0], known[:, 1]))

    def seconds(self, kind: str, detail: str, stage: int) -> float:
        weight_s = self.weight_s[stage]
        if kind == "backward":  # I of a zero-bubble schedule: gradients of inputs alone
            return self.backward_s[stage] - (weight_s if detail.startswith("I") else 0.0)
        return {"forward": self.forward_s[stage], "weight gradient": weight_s}[kind]


def step_times(
    workload: Workload, cluster: Cluster, strategy: Strategy, workers: int, batch: int
) -> WorkerTimes:
    """As `shoal predict` prices them, without any communication."""
    settings = PlanSettings(batch)
    predictor = Predictor(workload, cluster.of_size(workers))
    pricer = predictor.pricer(workers)
    resolved = resolve_step(workload, strategy, workers, settings)
    term: Any = strategy.sync_for(resolved.layout.replicas)
    question = predictor.question(pricer, resolved, pricer.price(*resolved), settings)
    table, stages = pricer.dealt(resolved.layout, resolved.split, resolved.shape)
    backward_s = [time.backward.seconds + time.recompute.seconds for time in table.times]
    update_s = resolved.fixed_s(pricer.cluster.device)
    if not term.has_servers or term.update == "worker":
        share = 1 / question.replicas if term.shards_state else 1.0
        update_s += question.update_part(share).seconds
    return WorkerTimes(
        rows=resolved.split.microbatch,
        forward_s=tuple(weights_of(stages, [time.forward.seconds for time in table.times])),
        backward_s=tuple(weights_of(stages, backward_s)),
        weight_s=tuple(weights_of(stages, [time.weight_s for time in table.times])),
        update_s=update_s,
        apply_s=Serving(term, question).update_s() if term.has_servers else 0.0,
    )


class Pace:
    """Lets the time of one worker pass while it computes."""

    def __init__(self, time: VirtualTime, times: WorkerTimes, rank: int, uneven: Unevenness):
        self._time = time
        self._times = times
        self._rank = rank
        self._uneven = uneven
        self._step: Step | None = None
        self._budget_s = self._spent_s = 0.0
        self._is_computing = False

    def watch(self, step: Step) -> None:
        """Hand over the buckets of this step at their moments."""
        self._step = step
        reduce = step.sync.reduce
        size = max(1, step.flat.size)

        def at_its_moment(bucket: slice) -> None:
            self._pass_up_to(self._times.share_of_backward(1 - bucket.start / size))
            reduce(bucket)

        step.sync.reduce = at_its_moment  # type: ignore[method-assign]

    @contextmanager
    def computing(self, kind: str, detail: str, microbatch: int | None) -> Iterator[None]:
        if self._is_computing or self._step is None:
            yield
            return
        self._is_computing = True
        self._budget_s = self._seconds(kind, detail, microbatch)
        self._spent_s = 0.0
        try:
            yield
            self._pass_up_to(1.0)
        finally:
            self._is_computing = False

    def _pass_up_to(self, share: float) -> None:
        if not self._is_computing:
            return
        passed_s = share * self._budget_s - self._spent_s
        if passed_s > 0:
            self._spent_s += passed_s
            self._time.sleep(passed_s)

    def _seconds(self, kind: str, detail: str, microbatch: int | None) -> float:
        step = self._step
        assert step is not None
        factor = self._uneven.factor(self._rank, step.steps)
        if kind == "update":
            return factor * self._times.update_s
        if microbatch is None or step.latest is None:  # of an evaluation
            return 0.0
        sizes: Sequence[int] = step.latest.microbatch_sizes
        rows = sizes[microbatch] if microbatch < len(sizes) else 0
        stage = step.mesh.pp.rank
        whole_s = self._times.seconds(kind, detail, stage)
        return factor * whole_s * rows / max(1, self._times.rows)


class PacedRecorder(Recorder):
    """Records spans in virtual time, and lets it pass in those of computing."""

    def __init__(self, pace: Pace, rank: int):
        super().__init__(rank, 0)
        self._pace = pace

    @contextmanager
    def span(
        self, kind: str, detail: object = "", microbatch: int | None = None, track: str = "main"
    ) -> Iterator[dict[str, Any]]:
        is_compute = track == "main" and kind in COMPUTE
        paced = self._pace.computing(kind, str(detail), microbatch) if is_compute else nullcontext()
        with super().span(kind, detail, microbatch, track) as more, paced:
            yield more


class ServerPace(Slowness):
    """Lets the time of a server pass while it applies updates."""

    def __init__(self, time: VirtualTime, apply_s: float, factor: float = 1.0):
        super().__init__()
        self._time = time
        self._apply_s = factor * apply_s
        self._versions: dict[int, int] = {}

    def applied(self, model: ServedModel) -> None:
        version = model.state.version
        is_update = version > self._versions.get(id(model), 0)
        self._versions[id(model)] = version
        if is_update and self._apply_s:
            self._time.sleep(self._apply_s)


def uneven_of(
    cluster: Cluster, slow: dict[int, float], jitter: float | None, seed: int
) -> Unevenness:
    """Workers as unequal as the cluster says, or as is asked for."""
    noise = cluster.noise
    if jitter is not None:
        if not 0 <= jitter <= 1:
            raise BadInput(f"--jitter is a share of a step's computing, 0 to 1, not {jitter:g}")
        noise = replace(noise, jitter=jitter)
    return Unevenness(noise, seed, slow)
