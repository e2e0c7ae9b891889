"""`shoal memory --limit`: which strategies fit into the memory of a device, in one table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from shoal.cluster.units import parse_bytes, show_bytes
from shoal.commands.launching import (
    check_trained,
    command_for,
    config_for,
    run_quietly,
    strategy_for,
)
from shoal.commands.output import plain_table, wide_console
from shoal.commands.script_workload import workload_of_script
from shoal.errors import BadInput, CheckFailed, ShoalError
from shoal.plan.workloads.traced_workload import TracedWorkload
from shoal.plan.workloads.workload import Split
from shoal.runtime.config import MemoryEstimateConfig
from shoal.runtime.files import scratch_folder
from shoal.strategy.strategy import Strategy, as_strategy

_USUAL = ("ddp", "zero(1)", "zero(2)", "zero(3)", "ps", "pp({n})", "tp({n})")
_MOST_LAYERS = 12  # shown of a deep model: the largest ones


@dataclass(frozen=True)
class MemoryQuestion:
    workers: int
    strategies: tuple[str, ...]
    limit: str | None

    @property
    def limit_bytes(self) -> int | None:
        if self.limit is None:
            return None
        found = parse_bytes(self.limit)
        if found <= 0:
            raise BadInput(f"--limit {self.limit} leaves no memory")
        return found

    @property
    def asked(self) -> tuple[str, ...]:
        """The strategies, or all usual ones for so many workers."""
        if self.strategies:
            return self.strategies
        if self.workers == 1:
            return ("single",)
        return tuple(text.format(n=self.workers) for text in _USUAL)


@dataclass(frozen=True)
class DeviceNeed:
    """What the fullest of some workers, or servers, needs; None where something is unknown."""

    where: str  # "each worker", "stage 0", "each server"
    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    other: int

    @property
    def total(self) -> int:
        known = self.parameters + self.gradients + self.optimizer + self.other
        return known + (self.activations or 0)


@dataclass(frozen=True)
class StrategyNeed:
    strategy: str
    devices: tuple[DeviceNeed, ...] = ()
    refused: str = ""  # why the strategy cannot train this model

    @property
    def most(self) -> int:
        return max((device.total for device in self.devices), default=0)

    def fits(self, limit_bytes: int | None) -> bool:
        return not self.refused and (limit_bytes is None or self.most <= limit_bytes)

    def as_dict(self, limit_bytes: int | None) -> dict[str, Any]:
        needs = [asdict(device) | {"total": device.total} for device in self.devices]
        found = {"strategy": self.strategy, "most": self.most, "devices": needs}
        found["fits"] = self.fits(limit_bytes)
        return found | ({"refused": self.refused} if self.refused else {})


@dataclass(frozen=True)
class LayerNeed:
    """One layer on one device, as the whole batch of one worker needs it."""

    layer: str
    count: int
    state: int  # parameters, gradients and optimizer state
    activations: int

    @property
    def total(self) -> int:
        return self.state + self.activations


def fits(script: str, args: Sequence[str] | None, question: MemoryQuestion, as_json: bool) -> None:
    """Print what each strategy needs; CheckFailed where none fits."""
    limit_bytes = question.limit_bytes
    strategies = [strategy_for(text, question.workers, to_run=False) for text in question.asked]
    command = command_for(script, args)
    needs = _needs(command, strategies, question.workers)
    layers, unknown = _layers(script, args)
    if as_json:
        print(json.dumps(_document(script, question, needs, layers)))
    else:
        _print(script, question, needs, layers)
        if unknown:
            print(unknown, file=sys.stderr)
    if not any(need.fits(limit_bytes) for need in needs):
        raise CheckFailed(_none_fits(question, needs, layers))


def estimates(
    command: list[str], strategies: Sequence[Strategy], workers: int, folder: Path
) -> list[dict[str, Any]]:
    """What workers and servers need under each strategy, from one run of the script."""
    wanted = MemoryEstimateConfig(folder, "\n".join(map(str, strategies)), workers)
    config = config_for(as_strategy("single"), device="cpu")
    run_quietly(command, 1, replace(config, memory_estimate=wanted))
    file = folder / "estimate.json"
    check_trained(file)
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def _needs(command: list[str], strategies: list[Strategy], workers: int) -> list[StrategyNeed]:
    with scratch_folder("memory") as folder:
        found = estimates(command, strategies, workers, folder)
    return [_need(*pair, workers) for pair in zip(found, strategies, strict=True)]


def _need(found: dict[str, Any], strategy: Strategy, workers: int) -> StrategyNeed:
    if "refused" in found:
        return StrategyNeed(str(strategy), refused=found["refused"])
    return StrategyNeed(str(strategy), tuple(_devices(found, strategy, workers)))


def _devices(found: dict[str, Any], strategy: Strategy, workers: int) -> Iterator[DeviceNeed]:
    """The fullest worker of each stage, and the fullest server."""
    layout = strategy.layout(workers)
    rows = found["workers"]
    per_stage = layout.ep * layout.cp * layout.tp
    for stage in range(layout.pp):
        of_stage = [row for rank, row in enumerate(rows) if rank // per_stage % layout.pp == stage]
        where = f"stage {stage}" if layout.pp > 1 else "each worker" if workers > 1 else "worker"
        yield max((_device(where, row) for row in of_stage), key=lambda need: need.total)
    if found["servers"]:
        where = "each server" if len(found["servers"]) > 1 else "the server"
        yield DeviceNeed(where, 0, 0, 0, 0, max(found["servers"]))


def _device(where: str, row: dict[str, int | None]) -> DeviceNeed:
    main = ("parameters", "gradients", "optimizer", "activations")
    other = sum(value or 0 for name, value in row.items() if name not in main)
    known = {name: row[name] or 0 for name in main[:-1]}
    return DeviceNeed(where, **known, activations=row["activations"], other=other)


# ------------------------------------------------------------------------------ layers


def _layers(script: str, args: Sequence[str] | None) -> tuple[list[LayerNeed], str]:
    """The layers on one device with the whole batch, or why they are not known."""
    try:
        traced = workload_of_script(script, args)
    except ShoalError as error:
        return [], str(error)
    return layer_needs(traced.workload, traced.batch), ""


def layer_needs(workload: TracedWorkload, batch: int) -> list[LayerNeed]:
    """What each layer needs on one device: its numbers, their gradients and state, activations."""
    precision = workload.precision
    width = precision.parameter_bytes + precision.gradient_bytes
    width += precision.master_bytes + precision.state_bytes
    needs = []
    for index, run in enumerate(workload.runs):
        cost = workload.cost(index, Split(microbatch=batch))
        state = round(cost.parameters * width)
        needs.append(LayerNeed(run.name, run.count, state, round(cost.activation_bytes)))
    return needs


# ------------------------------------------------------------------------------ what is said


def _document(
    script: str, question: MemoryQuestion, needs: list[StrategyNeed], layers: list[LayerNeed]
) -> dict[str, Any]:
    limit_bytes = question.limit_bytes
    return {
        "script": script,
        "workers": question.workers,
        "limit_bytes": limit_bytes,
        "strategies": [need.as_dict(limit_bytes) for need in needs],
        "layers": [asdict(layer) | {"total": layer.total} for layer in layers],
    }


def _none_fits(question: MemoryQuestion, needs: list[StrategyNeed], layers: list[LayerNeed]) -> str:
    limit_bytes = question.limit_bytes
    able = [need for need in needs if not need.refused]
    if limit_bytes is None or not able:
        return "none of the strategies can train this model"
    least = min(able, key=lambda need: need.most)
    text = f"nothing fits into {show_bytes(limit_bytes)}: {least.strategy} needs the least, "
    text += show_bytes(least.most)
    largest = max(layers, key=lambda layer: layer.total, default=None)
    if largest is not None and largest.total > limit_bytes:
        text += f"; layer {largest.layer} alone needs {show_bytes(largest.total)}: split it over "
        text += "more devices (tp, zero(3))"
    return text


def _print(
    script: str, question: MemoryQuestion, needs: list[StrategyNeed], layers: list[LayerNeed]
) -> None:
    console = wide_console()
    console.print(_strategy_table(script, question, needs))
    for need in needs:
        if need.refused:
            console.print(f"{need.strategy}: {need.refused}", soft_wrap=True)
    if layers:
        console.print(_layer_table(layers, question.limit_bytes))
    if question.limit_bytes is not None:
        fitting = [need.strategy for need in needs if need.fits(question.limit_bytes)]
        size = show_bytes(question.limit_bytes)
        console.print(f"within {size} a device: {', '.join(fitting) or 'none of them'}")


def _strategy_table(script: str, question: MemoryQuestion, needs: list[StrategyNeed]) -> Table:
    limit_bytes = question.limit_bytes
    noun = "worker" if question.workers == 1 else "workers"
    title = f"memory of {script} on {question.workers} {noun}"
    title += f", {show_bytes(limit_bytes)} each" if limit_bytes is not None else ""
    heads = ["strategy", "device", "params", "grads", "optimizer", "activations", "other", "sum"]
    table = plain_table(title, [*heads, ""], left=2)
    for need in needs:
        for number, device in enumerate(need.devices):
            verdict = _verdict(device.total, limit_bytes)
            table.add_row(need.strategy if not number else "", *_cells(device), verdict)
        if need.refused:
            table.add_row(need.strategy, "", *["-"] * 6, "refused")
    return table


def _cells(device: DeviceNeed) -> list[str]:
    held = device.activations
    return [
        device.where,
        show_bytes(device.parameters),
        show_bytes(device.gradients),
        show_bytes(device.optimizer),
        "?" if held is None else show_bytes(held),
        show_bytes(device.other),
        show_bytes(device.total),
    ]


def _verdict(total: int, limit_bytes: int | None) -> str:
    if limit_bytes is None:
        return ""
    return "fits" if total <= limit_bytes else "too large"


def _layer_table(layers: list[LayerNeed], limit_bytes: int | None) -> Table:
    """The largest layers, in the order of forward."""
    largest = sorted(layers, key=lambda layer: -layer.total)[:_MOST_LAYERS]
    title = "one device, whole batch, by layer"
    title += f" (the {_MOST_LAYERS} largest)" if len(layers) > _MOST_LAYERS else ""
    heads = ["layer", "times", "params, grads,\noptimizer", "activations", "each"]
    table = plain_table(title, [*heads, ""], left=1)
    for layer in layers:
        if layer in largest:
            sizes = (show_bytes(n) for n in (layer.state, layer.activations, layer.total))
            table.add_row(layer.layer, str(layer.count), *sizes, _verdict(layer.total, limit_bytes))
    return table
