"""What `shoal predict` and `shoal plan` are about: a model, and a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer

from shoal.cluster import Cluster
from shoal.cluster.hardware import LinkSpec
from shoal.cluster.presets import THIS_MACHINE, load_cluster
from shoal.cluster.units import parse_bytes, parse_s_per_byte
from shoal.commands import options
from shoal.commands.launching import EXAMPLES, command_for, config_for, run_quietly
from shoal.errors import BadInput
from shoal.launch.rank.auto import traced
from shoal.plan.predict import PlanSettings
from shoal.plan.workloads import Recompute, Workload
from shoal.plan.workloads.model_presets import PRESETS, default_batch, named_workload
from shoal.strategy.strategy import as_strategy


@dataclass(frozen=True)
class Subject:
    """A model, and the samples of its global batch."""

    workload: Workload
    batch: int


def workload_of_script(script: str, args: Sequence[str] | None = None) -> Subject:
    """Run a script, or an example, up to its first step, on tensors without memory."""
    run = partial(run_quietly, command_for(script, args))
    return Subject(*traced(config_for(as_strategy("single")), run))


RecomputeOption = Annotated[
    str, typer.Option("--recompute", help="Of activations: none, selective or full.")
]
_NETWORK_ALPHA_S = 5e-6
_Text = str | None
_Number = int | None


@dataclass(frozen=True)
class SubjectOptions:
    """The options that `shoal plan`, `predict` and `simulate` share."""

    model: Annotated[
        _Text,
        typer.Argument(
            help="A script that calls shoal.run, an example, or a transformer such as gpt-3.",
            show_default=False,
        ),
    ] = None
    args: options.ScriptArgs = None
    cluster: Annotated[str, typer.Option(help="A cluster file, or a preset such as dgx-a100.")] = (
        THIS_MACHINE
    )
    gpt: Annotated[
        _Text, typer.Option(help="A transformer by its sizes: layers=96,hidden=12288,heads=96,…")
    ] = None
    network: Annotated[
        _Text,
        typer.Option(help="One device in each node, joined by a network of this rate: 200Gb/s."),
    ] = None
    limit: Annotated[
        _Text,
        typer.Option(help="Memory of a device, such as 10GB.", show_default="the cluster's"),
    ] = None
    batch: Annotated[
        _Number,
        typer.Option(
            min=1,
            help="Samples of the global batch.",
            show_default="the script's; about 4 million tokens for a transformer",
        ),
    ] = None
    microbatch: Annotated[
        _Number,
        typer.Option(
            min=1,
            help="Samples of a micro-batch of one replica.",
            show_default="as the script accumulates; under pp two micro-batches for each stage",
        ),
    ] = None
    precision: Annotated[
        _Text, typer.Option(help="Of a transformer: mixed or fp32.", show_default="mixed")
    ] = None
    flash_attention: Annotated[
        bool, typer.Option("--flash-attention", help="Scores of attention are never in memory.")
    ] = False

    def subject(self, workers: int) -> Subject:
        if (self.model is None) == (self.gpt is None):
            raise BadInput("name a script or a model such as gpt-3, or give its sizes with --gpt")
        workload = named_workload(self.model, self.gpt, self.precision)
        if workload is not None:
            return Subject(workload, self.batch or default_batch(workload, workers))
        if self.precision is not None:
            raise BadInput("--precision is for transformers; a script says its precision itself")
        script = str(self.model)
        if not script.endswith(".py") and script not in EXAMPLES and not Path(script).exists():
            raise BadInput(
                f"{script!r} is no known transformer, and there is no such script here; known are "
                f"{', '.join(PRESETS)}, and others by their sizes with --gpt"
            )
        found = workload_of_script(script, self.args)
        return Subject(found.workload, self.batch or found.batch)

    def settings(self, batch: int, recompute: str = "none") -> PlanSettings:
        if recompute not in ("none", "selective", "full"):
            raise BadInput(f"--recompute is none, selective or full, not {recompute!r}")
        kept = cast(Recompute, recompute)
        return PlanSettings(batch, self.microbatch, kept, self.flash_attention)

    def hardware(self, workers: int) -> Cluster:
        """The cluster with what the options change of it."""
        cluster = named_cluster(self.cluster)
        if self.network is not None:
            rate = parse_s_per_byte(self.network)
            if rate <= 0:
                raise BadInput(f"--network takes a rate such as 200Gb/s, not {self.network!r}")
            link = LinkSpec("network", 1 / rate, _NETWORK_ALPHA_S)
            node = replace(cluster.node, devices=1, nic=link, nics=1)
            cluster = replace(cluster, node=node, nodes=workers, nodes_per_rack=None)
        if self.limit is not None:
            cluster = cluster.with_memory(float(parse_bytes(self.limit)))
        return cluster.of_size(workers)


def named_cluster(name: str | Path | Cluster) -> Cluster:
    """Itself, a preset or a file; this machine as it was calibrated, where that was done."""
    if isinstance(name, Cluster):
        return name
    if str(name) == THIS_MACHINE:
        from shoal.calibration.measure import cached_cluster  # only where it is needed

        return cached_cluster() or load_cluster(name)
    return load_cluster(name)
