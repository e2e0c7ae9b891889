"""How `shoal bench` runs a measurement in workers, and formats the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from shoal.commands.launching import run_quietly
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.files import scratch_folder


def measure_in_workers(
    module: str,
    options: Mapping[str, object],
    workers: int,
    config: RunConfig,
    run: Callable[[list[str], int, RunConfig], None] = run_quietly,
) -> Any:
    """The result that workers of `python -m module` write, run with these options."""
    with scratch_folder("bench") as folder:
        result = folder / "result.json"
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        run([sys.executable, "-m", module, *words, "--result", str(result)], workers, config)
        return json.loads(result.read_text())


def say(what: str) -> None:
    """Print to stderr what is being measured."""
    print(what, file=sys.stderr, flush=True)


def check_names(option: str, given: Iterable[str], known: Collection[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise BadInput(f"{option} takes {', '.join(known)}, not {', '.join(unknown)}")


def spread(timing: Mapping[str, float], unit: str) -> str:
    """A median, and below it its quartiles, with four digits."""
    median, low, high = (f"{timing[key + unit]:.4g}" for key in ("median", "low", "high"))
    return f"{median}\n({low}–{high})"
