"""Measure what joins hosts, on hosts that an engine lends: all-reduces over TCP and over Gloo."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from shoal.calibration.device import measured_calls
from shoal.calibration.measure import check_seconds
from shoal.cluster.cluster import Cluster
from shoal.cluster.hardware import MeasuredCalls
from shoal.errors import BadInput, ShoalError
from shoal.launch.local import LaunchSpec
from shoal.launch.machines import Machines
from shoal.launch.remote import run_remote
from shoal.runtime.config import RunConfig
from shoal.runtime.wording import counted

MODULE = "shoal.calibration.between_worker"
RESULT = "measured between hosts: "  # begins the line of rank 0 with what it has found
Found = Mapping[str, Any]


def calibrate_between(
    machines: Machines, config: RunConfig, cluster: Cluster, workers: int, seconds: float
) -> Cluster:
    """The same cluster with what was measured between its nodes."""
    check_seconds(seconds)
    config = replace(config, strategy="ddp", between=None)
    command = [sys.executable, "-m", MODULE, "--seconds", str(seconds)]
    lines: list[str] = []

    def write(text: str, is_stderr: bool) -> None:
        lines.extend(text.splitlines())

    run_remote(machines, LaunchSpec(command, workers, config), write)
    return replace(cluster, between=calls_between(_result(lines), workers))


def _result(lines: Iterable[str]) -> Found:
    for line in lines:
        _, mark, text = line.partition(RESULT)
        if mark:
            found: Found = json.loads(text)
            return found
    raise ShoalError("the workers have measured nothing between hosts")


def calls_between(found: Found, workers: int) -> tuple[MeasuredCalls, ...]:
    """BadInput where workers were not on several hosts, equally many on each."""
    if found["hosts"] < 2:
        raise BadInput(
            f"{counted(workers, 'worker')} on one host: nothing was measured between hosts; give "
            "--workers a multiple of the number of hosts"
        )
    if not found["even"]:
        raise BadInput(
            f"{workers} workers are not equally many on each of {found['hosts']} hosts: take "
            "another number with --workers"
        )
    return tuple(measured_calls(calls, found["hosts"]) for calls in found["calls"])
