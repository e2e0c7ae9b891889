"""What `shoal predict` and `shoal plan` are about: a model, and a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from shoal.cluster.cluster import Cluster
from shoal.cluster.hardware import LinkSpec
from shoal.cluster.presets import THIS_MACHINE, load_cluster
from shoal.cluster.units import parse_bytes, parse_s_per_byte
from shoal.commands.launching import EXAMPLES
from shoal.commands.script_workload import workload_of_script
from shoal.errors import BadInput
from shoal.plan.workloads.model_presets import PRESETS
from shoal.plan.workloads.models import default_batch, named_workload
from shoal.plan.workloads.workload import Workload

Model = Annotated[
    str | None,
    typer.Argument(
        help="A script that calls shoal.run, an example, or a transformer such as gpt-3.",
        show_default=False,
    ),
]
Gpt = Annotated[
    str | None,
    typer.Option(help="A transformer by its sizes: layers=96,hidden=12288,heads=96,…"),
]
ClusterName = Annotated[
    str, typer.Option("--cluster", help="A cluster file, or a preset such as dgx-a100.")
]
Network = Annotated[
    str | None,
    typer.Option(help="One device in each node, joined by a network of this rate: 200Gb/s."),
]
Batch = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Samples of the global batch.",
        show_default="the script's; about 4 million tokens for a transformer",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(help="Of a transformer: mixed or fp32.", show_default="mixed"),
]
Limit = Annotated[
    str | None,
    typer.Option(help="Memory of a device, such as 10GB.", show_default="the cluster's"),
]
FlashAttention = Annotated[
    bool, typer.Option("--flash-attention", help="Scores of attention are never in memory.")
]
_NETWORK_ALPHA_S = 5e-6


@dataclass(frozen=True)
class Subject:
    """A model, and the samples of its global batch."""

    workload: Workload
    batch: int


def subject_of(
    model: str | None,
    args: Sequence[str] | None,
    gpt: str | None,
    precision: str | None,
    batch: int | None,
    workers: int,
) -> Subject:
    if (model is None) == (gpt is None):
        raise BadInput("name a script or a model such as gpt-3, or give its sizes with --gpt")
    workload = named_workload(model, gpt, precision)
    if workload is not None:
        return Subject(workload, batch or default_batch(workload, workers))
    if precision is not None:
        raise BadInput("--precision is for transformers; a script says its precision itself")
    assert model is not None
    return _of_script(model, args, batch)


def _of_script(script: str, args: Sequence[str] | None, batch: int | None) -> Subject:
    if not script.endswith(".py") and script not in EXAMPLES and not Path(script).exists():
        raise BadInput(
            f"{script!r} is no known transformer, and there is no such script here; known are "
            f"{', '.join(PRESETS)}, and others by their sizes with --gpt"
        )
    found = workload_of_script(script, args)
    return Subject(found.workload, batch or found.batch)


def named_cluster(name: str | Path) -> Cluster:
    """A preset or a file; this machine as it was calibrated, where that was done."""
    if str(name) == THIS_MACHINE:
        from shoal.calibration.cache import cached_cluster  # only where it is needed

        return cached_cluster() or load_cluster(name)
    return load_cluster(name)


def cluster_of(name: str, network: str | None, limit: str | None, workers: int) -> Cluster:
    """The cluster with what the options change of it."""
    cluster = named_cluster(name)
    if network is not None:
        rate = parse_s_per_byte(network)
        if rate <= 0:
            raise BadInput(f"--network takes a rate such as 200Gb/s, not {network!r}")
        link = LinkSpec("network", 1 / rate, _NETWORK_ALPHA_S)
        node = replace(cluster.node, devices=1, nic=link, nics=1)
        cluster = replace(cluster, node=node, nodes=workers, nodes_per_rack=None)
    if limit is not None:
        cluster = cluster.with_memory(float(parse_bytes(limit)))
    return cluster.of_size(workers)
