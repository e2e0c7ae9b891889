"""This machine as a cluster, measured once by 1, 2, 4, … workers and kept in the cache folder.

Workers are started as a training run starts them. It is measured again on another host, with
another version of torch or another number of cores.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shoal.cluster import Cluster
from shoal.cluster.discover import this_machine
from shoal.cluster.toml_file import cluster_text, read_cluster
from shoal.errors import BadInput, ShoalError
from shoal.launch.here.local import LaunchSpec, launch
from shoal.launch.here.output import Write
from shoal.observe.calibration.device import machine_of
from shoal.runtime.config import RunConfig
from shoal.runtime.files import document_of, write_atomically
from shoal.runtime.memory_limit import cores
from shoal.runtime.wording import counted

MODULE = "shoal.observe.calibration.worker"
RESULT = "measured by all workers: "  # begins the line of rank 0 with what it has found
_START_S = 3.0  # until workers have loaded torch
LEAST_S = 1.5
_MOST_S = 86_400.0
Say = Callable[[str], None]


def check_seconds(seconds: float) -> None:
    """BadInput where a measurement cannot take so long."""
    if not 0 < seconds <= _MOST_S:
        raise BadInput(f"--seconds {seconds:g}: more than 0 and at most {_MOST_S:g} are expected")


def worker_counts(most: int) -> list[int]:
    """1, 2, 4, … and `most`."""
    counts = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*counts, most]


def _most(device: str | None) -> int:
    """As many workers as there are GPUs, where they train on GPUs; else as there are cores."""
    import torch  # only where it is needed: the command line does without

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device is not None and ":" in device:
        return 1
    return gpus or cores()


def calibrate(
    say: Say, seconds: float = 60.0, workers: int | None = None, device: str | None = None
) -> Cluster:
    """Measure this machine in so many seconds; what there is no time for is said.

    `workers`: the most at the same time; default as many as there are cores.
    """
    counts = worker_counts(workers or _most(device))
    ends_s = time.monotonic() + seconds
    documents = []
    left_out: Counter[str] = Counter()
    for number, count in enumerate(counts):
        each_s = (ends_s - time.monotonic()) / (len(counts) - number)
        each_s = max(_START_S + LEAST_S, each_s)
        say(f"[{number + 1}/{len(counts)}] {counted(count, 'worker')}, {each_s:.0f} s")
        config = RunConfig.from_environment()
        strategy = "ddp" if count > 1 else "single"
        command = [sys.executable, "-m", MODULE, "--until", str(time.monotonic() + each_s)]
        config = replace(config, strategy=strategy, device=device or config.device)
        spec = LaunchSpec(command, count, config, servers=int(count > 1))
        documents.append(found_by(partial(launch, spec)))
        left_out.update(documents[-1]["left_out"])
    if left_out:
        sections = ", ".join(f"{count} of {name}" for name, count in left_out.items())
        say(f"{seconds:g} s were too few to measure all; left out: {sections}; give more --seconds")
    here = this_machine()
    return machine_of(documents, cores(), here.device.memory_bytes * here.node.devices)


def found_by(run: Callable[[Write], object]) -> Any:
    """What rank 0 of a run has measured, from the lines that its workers write.

    Workers of other hosts may have no folder in common with this one.
    """
    lines: list[str] = []
    run(lambda text, is_stderr: lines.extend(text.splitlines()))
    for line in lines:
        _, mark, text = line.partition(RESULT)
        if mark and (found := document_of(text)) is not None:
            return found
    raise ShoalError("the workers have measured nothing")


def cache_file(device: str | None = None) -> Path:
    """The file of this host, version of torch, number of cores and kind of device."""
    environ = RunConfig.from_environment().environ
    folder = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    key = "\n".join([platform.node(), version("torch"), str(cores()), device or ""])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return Path(folder) / "shoal" / f"machine-{digest}.toml"


def calibrated_cluster(say: Say = lambda text: None, device: str | None = None) -> Cluster:
    """This machine, from the cache; measured for about a minute where it is not there."""
    if (kept := cached_cluster(device)) is not None:
        return kept
    say("measuring this machine once, for about 60 s")
    cluster = calibrate(say, device=device)
    keep(cluster, device)
    return cluster


def cached_cluster(device: str | None = None) -> Cluster | None:
    """None where this machine was not measured yet, or by another version of Shoal."""
    with suppress(BadInput):
        return read_cluster(cache_file(device))
    return None


def keep(cluster: Cluster, device: str | None = None) -> Path | None:
    """Keep a cluster in the cache; None where that folder cannot be written."""
    path = cache_file(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, cluster_text(cluster))
    except OSError:
        return None
    return path
