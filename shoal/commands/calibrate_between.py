"""`shoal cluster calibrate --on ENGINE`, and the choice of `shoal run --on ENGINE --cluster FILE`.

What joins hosts is chosen from the cluster file, unless SHOAL_BETWEEN names it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal.calibration.between import calibrate_between
from shoal.cluster.between import GLOO, TCP, BetweenChoice, choose_between
from shoal.cluster.cluster import Cluster
from shoal.cluster.hardware import MeasuredCalls
from shoal.cluster.presets import load_cluster
from shoal.cluster.toml_writer import cluster_text
from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands.engines import check_engine, is_private, open_engine
from shoal.commands.output import plain_table, wide_console, write_text
from shoal.errors import BadInput
from shoal.lab.lab import find_lab
from shoal.runtime.config import RunConfig
from shoal.runtime.lab_files import LabFiles
from shoal.runtime.wording import counted
from shoal.strategy.strategy import as_strategy

_GLOO_NEEDS = "Gloo needs SHOAL_TRUSTED_NETWORK=1"


def measure_between(
    on: str, cluster: str | None, output: Path | None, workers: int | None, seconds: float,
    as_json: bool,
) -> None:  # fmt: skip
    check_engine(on)
    name, file = _source(on, cluster, output)
    known = load_cluster(name)
    count = workers or known.nodes
    config = RunConfig.from_environment()
    what = f"all-reduces of {counted(count, 'worker')} on the hosts of {on}"
    _say(f"measuring {what}, about {seconds:g} s")
    with open_engine(on, config) as machines:
        found = calibrate_between(machines, config, known, count, seconds)
    text = cluster_text(found)
    write_text(file, text)
    if as_json:
        print(json.dumps({"files": [str(file)], "cluster": msgspec.toml.decode(text)}))
        return
    _print(found)
    print(f"written to {file}")


def _source(on: str, cluster: str | None, output: Path | None) -> tuple[str, Path]:
    """The cluster that is added to, and the file that is written."""
    if cluster is None:
        if on.partition("://")[0] != "lab":
            raise BadInput(f"--on {on}: name the cluster file with --cluster FILE")
        cluster = f"lab://{find_lab(on.partition('://')[2] or None).design.name}"
    if output is not None:
        return cluster, output
    if cluster == "lab" or cluster.startswith("lab://"):
        lab = find_lab(cluster.partition("://")[2] or None)
        return cluster, LabFiles(lab.design.name).cluster
    if not Path(cluster).is_file():
        raise BadInput(f"{cluster} is not a file: name one to write with -o")
    return cluster, Path(cluster)


def _print(cluster: Cluster) -> None:
    sizes = sorted({size for calls in cluster.between for size, _ in calls.points})
    heads = ["all-reduce", *map(show_bytes, sizes)]
    title = f"{cluster.name}: between {cluster.between[0].ranks} hosts, medians (quartiles)"
    table = plain_table(title, heads, left=1)
    for calls in cluster.between:
        table.add_row(calls.executor, *_row(calls))
    wide_console().print(table)
    choice = choose_between(cluster.between)
    if choice is not None:
        print(f"shoal run --cluster takes {choice.executor}: {choice.why}")
    elif GLOO not in {calls.executor for calls in cluster.between}:
        print(f"Gloo was not measured, so runs take TCP: {_GLOO_NEEDS}")


def _row(calls: MeasuredCalls) -> list[str]:
    return [
        f"{show_seconds(seconds)} ({show_seconds(low)}–{show_seconds(high)})"
        for (_, seconds), (low, high) in zip(calls.points, calls.spread, strict=True)
    ]


def with_measured_transport(config: RunConfig, cluster: Cluster, on: str) -> RunConfig:
    """The faster of TCP and Gloo between hosts, where both were measured; a line says so."""
    choice = choose_between(cluster.between)
    if choice is None or config.between is not None:
        return config
    choice = _allowed(choice, config, on)
    _say(f"hosts are joined by {choice.executor}: {choice.why} (cluster {cluster.name})")
    return replace(config, between=choice.executor)


def _allowed(choice: BetweenChoice, config: RunConfig, on: str) -> BetweenChoice:
    if choice.executor == TCP:
        return choice
    if not config.tls.trusted_network and not is_private(on):
        return BetweenChoice(TCP, f"{choice.why}, but {_GLOO_NEEDS}")
    if as_strategy(config.strategy or "single").is_elastic:
        return BetweenChoice(TCP, f"{choice.why}, but elastic groups need TCP")
    return choice


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
