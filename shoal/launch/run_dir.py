"""The directory of a run, which only this user can look into.

secret             what processes of this run prove to each other
store/             where workers meet
met                all workers have come
failure-2.json     why worker 2 fails, in its own words
finished-0         worker 0 is through
gone-2.json        the process of worker 2 has ended, in the launcher's words
report-0.json      what happened to worker 0
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.launch.environment import Placement, shoal_environment
from shoal.runtime.cores import threads_of

SECRET_BYTES = 32
SERVER_COMMAND = (sys.executable, "-m", "shoal.launch.server")
_REPORT_BYTES = 64 << 20


@contextmanager
def run_directory() -> Iterator[Path]:
    """With a fresh secret in it; gone at the end of the block."""
    path = Path(tempfile.mkdtemp(prefix="shoal-run-"))
    try:
        _make_secret(path)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _make_secret(run_dir: Path) -> None:
    """32 random bytes as 64 hexadecimal digits; made here and by nobody before."""
    file = os.open(run_dir / "secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w", encoding="ascii") as secret:
        secret.write(secrets.token_hex(SECRET_BYTES))


def worker_variables(run_dir: Path, rank: int, workers: int, servers: int) -> dict[str, str]:
    """What a worker on this host is told."""
    place = Placement("shoal", rank, workers, rank, workers, f"file://{run_dir}/store")
    told = {**shoal_environment(place), "SHOAL_RUN_DIR": str(run_dir)}
    return {**told, "SHOAL_SERVERS": str(servers)} if servers else told


def server_environment(
    base: Mapping[str, str], run_dir: Path, index: int, workers: int, servers: int
) -> dict[str, str]:
    """All variables of a server; it is told how many workers there are, and is none of them."""
    told = worker_variables(run_dir, 0, workers, servers)
    env = {name: value for name, value in base.items() if name not in told}
    for name in ("SHOAL_RUN_DIR", "SHOAL_SERVERS", "SHOAL_SIZE"):
        env[name] = told[name]
    env.update(threads_of(servers))
    env["SHOAL_SERVER_INDEX"] = str(index)
    env["SHOAL_LAUNCHER_PID"] = str(os.getpid())
    env["PYTHONUNBUFFERED"] = "1"
    env.pop("SHOAL_PROGRESS_FD", None)
    return env


def leave_report(run_dir: str | Path, rank: int, report: Mapping[str, Any]) -> None:
    """What happened to this worker, for the launcher; there as a whole or not at all."""
    path = Path(run_dir) / f"report-{rank}.json"
    part = path.with_suffix(".part")
    with suppress(OSError):  # a full disk must not fail a run that went well
        part.write_text(json.dumps(report), encoding="utf-8")
        os.replace(part, path)


def read_reports(run_dir: Path, workers: int) -> list[dict[str, Any] | None]:
    """The reports by rank; None for a worker that left none."""
    return [_read_report(run_dir / f"report-{rank}.json") for rank in range(workers)]


def _read_report(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > _REPORT_BYTES:
            return None
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
