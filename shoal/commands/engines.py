"""Engines that lend hosts, by the name that `--on` takes: NAME or NAME://ADDRESS.

A new engine is a file with its `Machines`, and a line here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from shoal.errors import BadInput
from shoal.launch.machines import Machines
from shoal.runtime.config import RunConfig, set_default_variables


def _ray(address: str, config: RunConfig) -> Machines:
    # Ray reads them when it is imported
    set_default_variables(RAY_AUTH_MODE="token", RAY_USAGE_STATS_ENABLED="0")
    from shoal.launch.ray_machines import RayMachines

    return RayMachines(address, config)


def _lab(address: str, config: RunConfig) -> Machines:
    from shoal.lab.machines import LabMachines  # each engine is loaded only where it is used

    return LabMachines(address or None)


# called with ADDRESS, which is empty without one, and the configuration of the run
ENGINES: dict[str, Callable[[str, RunConfig], Machines]] = {"lab": _lab, "ray": _ray}

_PRIVATE = frozenset({"lab"})  # their Machines have `is_private`


def is_private(text: str) -> bool:
    """Whether no other user can read what the hosts of this engine send to each other."""
    return text.partition("://")[0] in _PRIVATE


def check_engine(text: str) -> None:
    """BadInput where there is no such engine."""
    name, mark, address = text.partition("://")
    if name in ENGINES and (address or not mark):
        return
    if name in ENGINES:
        raise BadInput(f"--on {text} lacks what comes after ://; --on {name} takes the default")
    near = difflib.get_close_matches(name, ENGINES, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise BadInput(f"--on takes {' or '.join(ENGINES)}, not {text!r}{hint}")


def open_engine(text: str, config: RunConfig) -> Machines:
    """The hosts of an engine, as a block."""
    check_engine(text)
    name, _, address = text.partition("://")
    return ENGINES[name](address, config)
