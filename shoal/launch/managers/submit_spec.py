"""What `shoal submit` asks a cluster manager for, checked once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import BadInput
from shoal.runtime.config import variable_name
from shoal.runtime.wording import counted

MARK = "shoal-submit"  # in every file that is written
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(
    r"(?:(?P<d>\d{1,4})-(?P<dh>\d{1,2})(?::(?P<dm>\d{1,2})(?::(?P<ds>\d{1,2}))?)?"
    r"|(?:(?P<h>\d{1,6}):(?P<hm>\d{1,2}):(?P<hs>\d{1,2}))"
    r"|(?P<m>\d{1,8})(?::(?P<s>\d{1,2}))?)"
)
_MEMORY = re.compile(r"(\d{1,12})([KMGT]?)")
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True)
class SubmitSpec:
    """One job. `command` is the program of every worker, with its arguments."""

    command: tuple[str, ...]
    workers: int
    name: str
    nodes: int = 1
    gpus_per_node: int = 0
    cpus: int | None = None  # of each worker
    memory: str | None = None  # of each node: 64G
    time: str | None = None  # as Slurm takes it: 1-12:00:00, 12:00:00, 90 (minutes)
    environ: Mapping[str, str] = field(default_factory=dict)
    requeue: bool = False  # start again after a preemption
    restarts: int = 0  # start again after so many crashes
    notice_s: int = 60  # from the signal to the end

    def __post_init__(self) -> None:
        if self.nodes > self.workers:
            workers = counted(self.workers, "worker")
            raise BadInput(
                f"--nodes {self.nodes} is more than the {workers} of -n: every node needs one"
            )
        if _NAME.fullmatch(self.name) is None:
            raise BadInput(
                f"--job-name {self.name!r}: use at most 40 lower-case letters, digits and -, "
                "beginning with a letter"
            )
        if self.memory is not None:
            memory_mib(self.memory)
        if self.time is not None:
            seconds_of(self.time)

    @property
    def workers_per_node(self) -> int | None:
        """None where nodes have different numbers."""
        return None if self.workers % self.nodes else self.workers // self.nodes


def seconds_of(time: str) -> int:
    """A time limit in Slurm's notation.

    >>> [seconds_of(text) for text in ("90", "90:30", "12:00:00", "1-12", "1-12:30:05")]
    [5400, 5430, 43200, 129600, 131405]
    """
    found = _TIME.fullmatch(time) if time.isascii() else None
    if found is None:
        raise BadInput(f"--time {time!r}: use minutes, HH:MM:SS or DAYS-HH:MM:SS")
    n = {name: int(text or 0) for name, text in found.groupdict().items()}
    hours = n["d"] * 24 + n["dh"] + n["h"]
    seconds = (hours * 60 + n["dm"] + n["hm"] + n["m"]) * 60 + n["ds"] + n["hs"] + n["s"]
    if not seconds:
        raise BadInput(f"--time {time!r}: a job needs more than no time")
    return seconds


def memory_mib(memory: str) -> int:
    """Memory in Slurm's notation, whose unit without a letter is MiB.

    >>> [memory_mib(text) for text in ("512", "64G", "2048K")]
    [512, 65536, 2]
    """
    found = _MEMORY.fullmatch(memory) if memory.isascii() else None
    scale = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
    mib = 0 if found is None else int(int(found[1]) * scale[found[2]])
    if mib < 1:
        raise BadInput(f"--memory {memory!r}: use a number with K, M, G or T, such as 64G")
    return mib


def read_variables(texts: Iterable[str]) -> dict[str, str]:
    """The variables of `--env NAME=VALUE`."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or _VARIABLE.fullmatch(name) is None:
            raise BadInput(f"--env takes NAME=VALUE, not {text!r}")
        if name == variable_name("secret"):
            raise BadInput(
                f"--env {name} would write the secret into a file: use --secret-file or, for "
                "Kubernetes, --secret"
            )
        found[name] = value
    return found


def name_of(script: str) -> str:
    """A name for a job, from that of its script.

    >>> name_of("runs/Train_GPT.2.py")
    'train-gpt-2'
    """
    words = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:40].strip("-")
    return words if _NAME.fullmatch(words) else f"job-{words}"[:40].strip("-")
