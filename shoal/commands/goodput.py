"""Failures of nodes in `shoal plan` and `predict`: options, and what is useful of a month."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from shoal.cluster import Cluster
from shoal.cluster.units import parse_bytes_per_s, parse_seconds, show_bytes, show_seconds
from shoal.commands.options import option
from shoal.commands.output import Part, bold, plain_table
from shoal.errors import BadInput
from shoal.plan.goodput import REPAIR_S, STORAGE_BYTES_PER_S, Failures, Goodput, Saves
from shoal.runtime.wording import counted

_MONTH_H = 720.0
_HEADS = [
    "answer",
    "useful",
    "saves",
    "lost\nwork",
    "re-\nstarts",
    "repair",
    "a step's\nwork",
    "as",
]


@dataclass(frozen=True)
class FailureOptions:
    """What `shoal plan` and `predict` are told about failures."""

    mtbf: str | None = option("Mean time between failures of any node of the run, such as 8h.")
    node_mtbf: str | None = option("The same of one node, such as 5000h.")
    spare: int = option("Nodes that wait for failures.", 0, min=0, max=1000)
    repair: str | None = option("Until a node is replaced.", show_default="the file's, or 4h")
    detect: str = option("Time until a failure is noticed.", "30s")
    restart_time: str = option("Time until workers load.", "2min")
    storage: str | None = option("Rate of their storage.", show_default="the file's, or 10GB/s")
    saves: Saves = option(
        "Training waits for rank 0's copy, all, or copies of parts.", "background"
    )

    def on(self, cluster: Cluster, workers: int) -> tuple[Cluster, Failures | None]:
        """The cluster with this storage, and its failures, where it is known that there are."""
        node = cluster.node
        mtbf_s = cluster.node.mtbf_s
        if mtbf_s is None and self == FailureOptions():
            return cluster, None
        if (self.mtbf and self.node_mtbf) or not (self.mtbf or self.node_mtbf or mtbf_s):
            raise BadInput("for failures give --mtbf, of all nodes, or --node-mtbf, of one")
        each_s = parse_seconds(self.node_mtbf) if self.node_mtbf else mtbf_s or 0.0
        mtbf_s = parse_seconds(self.mtbf) if self.mtbf else each_s / -(-workers // node.devices)
        if mtbf_s < 60:
            raise BadInput(f"a failure every {show_seconds(mtbf_s)}: the least is 1 minute")
        rate = parse_bytes_per_s(self.storage) if self.storage else cluster.storage_bytes_per_s
        if self.storage and rate is None:
            raise BadInput(f"--storage takes a rate such as 100GB/s, not {self.storage!r}")
        repair_s = parse_seconds(self.repair) if self.repair else node.repair_s or REPAIR_S
        found = Failures(
            mtbf_s,
            self.spare,
            repair_s,
            parse_seconds(self.detect),
            parse_seconds(self.restart_time),
            self.saves,
        )
        return replace(cluster, storage_bytes_per_s=rate), found


def goodput_parts(found: Goodput, cluster: Cluster) -> Iterator[Part]:
    """What is useful of a month under each answer, and where the rest goes."""
    failures = found.failures
    node = cluster.node
    renewal = found.renewal
    mtbf_s = failures.mtbf_s
    load_s = renewal.recovery_s - failures.detect_s - failures.start_s
    each = f"{counted(found.nodes, 'node')}, each fails every {show_seconds(mtbf_s * found.nodes)}"
    yield bold(f"\nuseful of a month with a failure every {show_seconds(mtbf_s)} ({each})")
    rows = []
    for one in found.answers:
        shares = [f"{share:.1%}" for share in astuple(one.shares)]
        rows.append([one.name, *shares, show_seconds(one.effective_s), one.strategy])
    table = plain_table("", _HEADS, rows, left=1)
    table.columns[-1].justify = "left"
    table.columns[-1].overflow = "fold"
    yield table
    best_s = found.answers[0].interval_s
    young_s = renewal.young_s
    daly_s = renewal.daly_s
    every = (("best", best_s), ("Young", young_s), ("Daly", daly_s))
    said = [f"{name} {show_seconds(s)} ({renewal.shares(s).useful:.2%})" for name, s in every]
    yield (
        f"saves of {show_bytes(found.checkpoint_bytes)} hold training up for "
        f"{show_seconds(renewal.held_s)} and are complete {show_seconds(renewal.written_s)} later; "
        f"between two, and what that leaves without repairs: {', '.join(said)}"
    )
    yield (
        f"a failure takes {show_seconds(failures.detect_s)} to be noticed, workers "
        f"{show_seconds(failures.start_s)} to start and {show_seconds(load_s)} to load at "
        f"{show_bytes(cluster.storage_bytes_per_s or STORAGE_BYTES_PER_S)}/s; repairs take "
        f"{show_seconds(failures.repair_s)}, {counted(failures.spares, 'node')} to spare"
    )
    amounts = {
        "costs {:,.0f}": (node.price_per_hour, found.nodes + failures.spares),
        "takes {:,.0f} kWh": (node.watts and node.watts / 1e3, found.nodes),
    }
    for text, (each_h, nodes) in amounts.items():
        if each_h is not None:
            amount = each_h * nodes * _MONTH_H
            lost = 1 - found.best.shares.useful
            yield f"a month {text.format(amount)}, of which {amount * lost:,.0f} is not useful"
