"""The cluster file of this machine, measured once and kept in the user's cache folder.

It is measured again on another host, with another version of torch or another number of cores.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from shoal.calibration.measure import CalibrationOptions, calibrate
from shoal.cluster.cluster import Cluster
from shoal.cluster.toml_file import read_cluster
from shoal.cluster.toml_writer import cluster_text
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.cores import cores

Say = Callable[[str], None]


def cache_file(device: str | None = None) -> Path:
    """The file of this host, version of torch, number of cores and kind of device."""
    environ = RunConfig.from_environment().environ
    folder = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    key = "\n".join([platform.node(), version("torch"), str(cores()), device or ""])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return Path(folder) / "shoal" / f"machine-{digest}.toml"


def calibrated_cluster(
    seconds: float = 60.0, say: Say = lambda text: None, device: str | None = None
) -> Cluster:
    """This machine, from the cache; measured for about `seconds` where it is not there."""
    kept = cached_cluster(device)
    if kept is not None:
        return kept
    say(f"measuring this machine once, for about {seconds:.0f} s")
    cluster = calibrate(CalibrationOptions(seconds=seconds, device=device), say)
    keep(cluster, device)
    return cluster


def cached_cluster(device: str | None = None) -> Cluster | None:
    """None where this machine was not measured yet, or by another version of Shoal."""
    path = cache_file(device)
    if not path.is_file():
        return None
    with suppress(BadInput):
        return read_cluster(path)
    return None


def keep(cluster: Cluster, device: str | None = None) -> Path | None:
    """Keep a cluster in the cache; None where that folder cannot be written."""
    path = cache_file(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{id(cluster):x}.tmp")
        draft.write_text(cluster_text(cluster), encoding="utf-8")
        draft.replace(path)
    except OSError:
        return None
    return path
