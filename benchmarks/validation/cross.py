"""Every published table, predicted by a fit to the sources of its GPU that are others.

One set of constants a GPU. The fit starts at `PRIORS`, which no table had a part in: datasheets,
measured collectives, and what an eager program takes for a launch. A GPU with few tables takes the
constants of software from the fit of the one with most. All tables weigh the same in a fit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

from benchmarks.validation.compare import Compared, PricedTable
from benchmarks.validation.fit import AMPERE, Fitted, constants_of, fit, with_constants
from benchmarks.validation.published import PublishedTable
from shoal.cluster import Cluster
from shoal.cluster.presets import load_cluster

PRIORS: Mapping[str, float] = {
    "matmul_efficiency": 0.75,
    "matmul_half_at_flops": 1e10,
    "attention_factor": 2.3,  # FlashAttention of 2022: 110 TFLOP/s of causal attention, cuBLAS: 260
    "eager_factor": 3.0,  # Narayanan et al., SC'21, section 5.8: 135 and 113 TFLOP/s of 175B
    "overlap_cost": 0.2,
    "memory_efficiency": 0.8,
    "memory_half_at_bytes": 1e5,
    "launch_s": 6e-5,  # of the several kernels and the Python behind each operation
    "wait_s": 1e-5,
    "call_s": 3.5e-5,  # of an all-reduce inside a node, as vTrain's table of them
    "step_s": 5e-3,
    "microbatch_s": 1e-3,  # Python around a forward and a backward
    "fabric_efficiency": 0.77,  # 231 of 300 GB/s, Azure AI benchmarking guide
    "fabric_alpha_s": 3.4e-6,  # NCCL's own constants
    "nic_efficiency": 0.94,  # 188 of 200 GB/s, all-reduce of several DGX A100
    "nic_alpha_s": 1.4e-5,
}
SOFTWARE = ("attention_factor", "eager_factor", "overlap_cost", "launch_s", "wait_s", "step_s")
HOPPER: Mapping[str, float] = {  # of the H100, where they differ
    "attention_factor": 1.2,  # FlashAttention-3 and cuDNN: about 600 TFLOP/s
    "matmul_efficiency": 0.72,
}
# an H100's operations a second over an A100's, beside its units (132 of 108) and clock (1755 of
# 1410 MHz): attention written for the A100 gains from the latter two only
_UNUSED = 989 / 312 / (132 * 1755 / (108 * 1410))
_ROWS = 10  # of a table, at most, in a fit
_ROUNDS, _AGAIN = 20, 12  # of a fit at most, and of one that starts at the fit to all tables
Say = Callable[[str], None]


@dataclass(frozen=True)
class HeldOut:
    """A table that its fit did not see."""

    table: PublishedTable
    rows: tuple[Compared, ...]
    fitted: Fitted

    @property
    def errors(self) -> list[float]:
        return [row.error for row in self.rows]

    @property
    def median_error(self) -> float:
        return statistics.median(map(abs, self.errors))


class _Priced:
    def __init__(self, table: PublishedTable):
        self.table = table
        self.whole = PricedTable(table.rows, table.runs_as)
        number = len(table.rows)
        count = min(number, _ROWS)
        self.some = self.whole.some([n * number // count for n in range(count)])
        self._known: dict[Cluster, list[float]] = {}

    def predict(self, there: Cluster) -> list[float]:
        """Of `some`; fits that leave one table out try the same constants first."""
        if there not in self._known:
            self._known[there] = self.some.predict(there)
        return self._known[there]


def fit_tables(
    cluster: Cluster, tables: Sequence[_Priced], near: Mapping[str, float] | None = None
) -> Fitted:
    rows = [row for one in tables for row in one.some.rows]
    weights = [min(1.0, math.sqrt(3 / len(t.some.rows))) for t in tables for _ in t.some.rows]

    def predict(there: Cluster) -> list[float]:
        return [seconds for one in tables for seconds in one.predict(there)]

    rounds = _ROUNDS if near is None else _AGAIN
    return fit(cluster, [row.seconds for row in rows], predict, rounds, weights, near)


def leave_one_out(
    tables: Iterable[PublishedTable], say: Say = lambda text: None
) -> tuple[list[HeldOut], dict[str, Fitted]]:
    """Every table as its fit did not see it, and the fit to all tables of each GPU."""
    by_cluster: dict[str, list[_Priced]] = {}
    for table in tables:
        by_cluster.setdefault(table.cluster, []).append(_Priced(table))
    held, priors = [], dict(PRIORS)
    fits: dict[str, Fitted] = {}
    for name, there in sorted(by_cluster.items(), key=lambda item: -len(item[1])):
        own = HOPPER if name == "dgx-h100" else {}
        cluster = with_constants(_with_ampere(load_cluster(name), fits), {**priors, **own})
        say(f"{name}: a fit to {len(there)} tables")
        fits[name] = fit_tables(cluster, there)
        leaving = partial(_left_out, cluster, there, fits[name].values)
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            for one, found in zip(there, pool.map(leaving, range(len(there))), strict=True):
                say(f"{name}: {one.table.name} left out")
                held.append(found)
        if priors == PRIORS:
            priors |= {key: fits[name].values.get(key, priors[key]) for key in SOFTWARE}
    return held, fits


def _left_out(
    cluster: Cluster, tables: Sequence[_Priced], near: Mapping[str, float], index: int
) -> HeldOut:
    one = tables[index]
    source = one.table.source
    fitted = fit_tables(cluster, [t for t in tables if t.table.source != source] or tables, near)
    return HeldOut(one.table, _compared(one, fitted.cluster), fitted)


def _with_ampere(cluster: Cluster, fits: Mapping[str, Fitted]) -> Cluster:
    """With what attention of the A100 takes, where that was fitted."""
    if "dgx-a100" not in fits:
        return cluster
    known = constants_of(fits["dgx-a100"].cluster)
    factor = _UNUSED * known["attention_factor"] / known["matmul_efficiency"]
    factors = {**cluster.device.kernel_factors, AMPERE: factor}
    return replace(cluster, device=replace(cluster.device, kernel_factors=factors))


def _compared(one: _Priced, cluster: Cluster) -> tuple[Compared, ...]:
    predicted = one.whole.predict(cluster)
    return tuple(
        Compared(row.line, row.strategy, row.workers, row.seconds, seconds)
        for row, seconds in zip(one.table.rows, predicted, strict=True)
    )
