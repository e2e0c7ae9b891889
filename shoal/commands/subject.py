"""What `shoal predict` and `shoal plan` are about: a model, and a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.cluster import Cluster
from shoal.cluster.hardware import LinkSpec
from shoal.cluster.presets import THIS_MACHINE, load_cluster
from shoal.cluster.program import CHOICES, FUSED, PYTORCH, ModelProgram
from shoal.cluster.units import parse_bytes, parse_s_per_byte
from shoal.commands import options
from shoal.commands.launching import EXAMPLES, command_for, config_for, run_quietly
from shoal.commands.options import argument, option
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings
from shoal.plan.workloads import OPERATIONS, Workload
from shoal.plan.workloads.model_presets import PRESETS, default_batch, named_workload
from shoal.runtime.faults import read_slow
from shoal.runtime.wording import counted
from shoal.strategy.strategy import as_strategy
from shoal.worker.auto import traced


@dataclass(frozen=True)
class Subject:
    """A model, and the samples of its global batch."""

    workload: Workload
    batch: int
    follows: bool = False  # the batch is larger with more workers


def workload_of_script(script: str, args: Sequence[str] | None = None) -> Subject:
    """Run a script, or an example, up to its first step, on tensors without memory."""
    return workload_of_command(command_for(script, args))


def workload_of_command(command: Sequence[str]) -> Subject:
    return Subject(*traced(config_for(as_strategy("single")), partial(run_quietly, command)))


SLOW_WORKERS = option(
    "Slow workers down: 7:3x makes worker 7 three times slower, node:2:3x and "
    "rack:3:2x all of a node or rack; repeatable."
)
LOST_WORKERS = option(
    "Leave a worker out: 12, or all of node:2 or rack:3, with what is left of their replicas; the "
    "others do the whole batch. Repeatable."
)
_NETWORK_ALPHA_S = 5e-6


@dataclass(frozen=True)
class SubjectOptions:
    """The options that `shoal plan` and `predict` share."""

    model: str | None = argument(
        "A script that calls shoal.run, an example, or a transformer such as gpt-3.",
        show_default=False,
    )
    args: list[str] | None = options.SCRIPT_ARGS
    cluster: str | None = option(
        "A cluster file, or a preset such as dgx-a100.", show_default=THIS_MACHINE
    )
    gpt: str | None = option("A transformer by its sizes: layers=96,hidden=12288,heads=96,…")
    network: str | None = option(
        "One device in each node, joined by a network of this rate: 200Gb/s."
    )
    limit: str | None = option("Memory of a device, such as 10GB.", show_default="the cluster's")
    batch: int | None = option(
        "Samples of the global batch.",
        min=1,
        show_default="the script's; about 4 million tokens for a transformer",
    )
    microbatch: int | None = option(
        "Samples of a micro-batch of one replica.",
        min=1,
        show_default="as the script accumulates; under pp two micro-batches for each stage",
    )
    precision: str | None = option("Of a transformer: mixed or fp32.", show_default="mixed")
    kernels: str | None = option(
        "What runs: eager, compiled, or fused as in Megatron-LM.", show_default="eager"
    )
    attention: str | None = option(
        "Its kernel: sdpa (as PyTorch chooses), flash2, flash3, efficient, cudnn or math.",
        show_default="sdpa",
    )
    loss: str | None = option(
        "autocast, fp32 (of logits.float()), or chunked without whole logits.",
        show_default="autocast",
    )
    update: str | None = option("Of the optimizer: foreach or fused.", show_default="foreach")
    power_limit: float | None = option("Watts of a device.", show_default="the cluster's")

    def subject(self, workers: int) -> Subject:
        if (self.model is None) == (self.gpt is None):
            raise BadInput("name a script or a model such as gpt-3, or give its sizes with --gpt")
        workload = named_workload(self.model, self.gpt, self.precision, self.program())
        if workload is not None:
            batch = self.batch or default_batch(workload, workers)
            return Subject(workload, batch, self.batch is None)
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

    def notes(self, subject: Subject, workers: int) -> tuple[str, ...]:
        """What was taken for granted."""
        said = []
        if subject.follows:
            said.append(
                f"--batch was not given: {subject.batch} follows from -n, at most 16 samples a "
                "worker and about 4 million tokens"
            )
        here = named_cluster(self.cluster or THIS_MACHINE)
        is_here = self.cluster in (None, THIS_MACHINE) and self.network is None
        if is_here and workers > here.devices:
            nodes = here.of_size(workers).nodes
            counts = f"{nodes} machines like it are counted" if nodes > 1 else "they share it"
            said.append(f"this machine has room for {counted(here.devices, 'worker')}: {counts}")
        return tuple(said)

    def settings(self, batch: int) -> PlanSettings:
        program = self.program()
        is_flash = program.attention != "math"
        return PlanSettings(batch, self.microbatch, flash_attention=is_flash, program=program)

    def program(self) -> ModelProgram:
        """What runs: as the options say, else the cluster file, else a plain loop of PyTorch."""
        given = {name: getattr(self, name) for name in ModelProgram._fields}
        options = {name: value for name, value in given.items() if value is not None}
        for name, value in options.items():
            if value not in CHOICES[name]:
                raise BadInput(f"--{name} is {', '.join(CHOICES[name])}, not {value!r}")
        return program_on(named_cluster(self.cluster or THIS_MACHINE), options)

    def link(self) -> LinkSpec | None:
        """The network, where one was asked for."""
        if self.network is None:
            return None
        rate = parse_s_per_byte(self.network)
        if rate <= 0:
            raise BadInput(f"--network takes a rate such as 200Gb/s, not {self.network!r}")
        return LinkSpec("network", 1 / rate, _NETWORK_ALPHA_S)

    def hardware(self, workers: int) -> Cluster:
        """The cluster with what the options change of it."""
        cluster = named_cluster(self.cluster or THIS_MACHINE)
        if (link := self.link()) is not None:
            node = replace(cluster.node, devices=1, nic=link, nics=1)
            cluster = replace(cluster, node=node, nodes=workers, nodes_per_rack=None)
        if self.limit is not None:
            cluster = cluster.with_memory(float(parse_bytes(self.limit)))
        if self.power_limit is not None:
            if cluster.device.watts is None:
                raise BadInput(f"--power-limit: [device] of {cluster.name} does not say its watts")
            device = replace(cluster.device, power_limit_watts=self.power_limit)
            cluster = replace(cluster, device=device)
        return cluster.of_size(workers)


@dataclass(frozen=True)
class PredictedStepOptions:
    """The options of `predict` about one step; `plan` tries what there is."""

    recompute: str = option(
        "Of activations: none, selective, full, or operations: norm, qkv, attention, up, "
        "activation, such as norm,activation.",
        "none",
    )
    overlap: bool = option("Gradients are sent while backward runs.", True)
    even_stages: bool = option("As many blocks in every stage of pp.", False, "--even-stages")
    scatter_sends: bool = option(
        "Ranks of tp send a part each between stages, and gather it.", False, "--scatter-sends"
    )
    hide: str = option("Communication that runs beside computing: of tp, ep, pp.", "")

    def on(self, settings: PlanSettings) -> PlanSettings:
        whole = {"none", "selective", "full"}
        unknown = set(self.recompute.split(",")) - set(OPERATIONS)
        if unknown and self.recompute not in whole:
            known = f"none, selective, full, or some of {', '.join(OPERATIONS)}"
            raise BadInput(f"--recompute is {known}, not {min(unknown)!r}")
        return replace(settings, **vars(self) | {"hide": hidden_axes(self.hide)})


def hidden_axes(text: str) -> tuple[str, ...]:
    hide = tuple(filter(None, text.split(",")))
    if unknown := set(hide) - {"tp", "ep", "pp"}:
        raise BadInput(f"--hide takes tp, ep and pp, such as tp,pp, not {min(unknown)!r}")
    return hide


def slow_workers(texts: Sequence[str], cluster: Cluster, workers: int) -> dict[int, float]:
    """By worker, times slower; for a node or rack what is said of its first worker."""
    found: dict[int, float] = {}
    for text in texts:
        where, _, factor = text.rpartition(":")
        ranks = workers_at(where, "--slow", cluster, workers)
        found |= dict.fromkeys(ranks, read_slow([f"{ranks[0]}:{factor}"], workers)[ranks[0]])
    return found


def workers_at(text: str, option: str, cluster: Cluster, workers: int) -> range:
    """A worker, or those of a node or rack."""
    match = re.fullmatch(r"(node:|rack:|)([0-9]{1,9})", text)
    if match is None:
        raise BadInput(
            f"{option} is about a worker such as 12, node:2 or rack:3, not {text[:40]!r}"
        )
    in_node = cluster.node.devices
    in_rack = (cluster.nodes_per_rack or cluster.nodes) * in_node
    each = {"": 1, "node:": in_node, "rack:": in_rack}[match[1]]
    first = int(match[2]) * each
    if first >= workers:
        last = f"the last of {counted(workers, 'worker')} is {match[1]}{(workers - 1) // each}"
        raise BadInput(f"{option}: there is no {text if match[1] else 'worker ' + text}, {last}")
    return range(first, min(first + each, workers))


def program_on(cluster: Cluster, options: Mapping[str, str]) -> ModelProgram:
    """Of the options and the cluster's keys; what neither says is as in a plain loop."""
    chosen: dict[str, Any] = {**cluster.program, **options}
    base = FUSED if chosen.get("kernels") == "fused" else PYTORCH
    return base._replace(**chosen)


def named_cluster(name: str | Path | Cluster) -> Cluster:
    """Itself, a preset or a file; this machine as it was calibrated, where that was done."""
    if isinstance(name, Cluster):
        return name
    if str(name) == THIS_MACHINE:
        from shoal.observe.calibration.measure import cached_cluster  # only where it is needed

        return cached_cluster() or load_cluster(name)
    return load_cluster(name)
