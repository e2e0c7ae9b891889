"""What `shoal submit` asks a cluster manager for: all options of the command, checked once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from shoal.commands import options
from shoal.commands.launching import EXAMPLES, command_for, strategy_for
from shoal.commands.options import option
from shoal.errors import BadInput
from shoal.launch.here.checkpoint_option import OPTION_NAME, read_folder
from shoal.runtime.config import CheckpointConfig, RunConfig, TlsConfig, variable_name
from shoal.runtime.wording import counted

MARK = "shoal-submit"  # in every file that is written
TRUSTED = variable_name("trusted_network", TlsConfig)
CHECKPOINT = variable_name("folder", CheckpointConfig)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(
    r"(?:(?P<d>\d{1,4})-(?P<dh>\d{1,2})(?::(?P<dm>\d{1,2})(?::(?P<ds>\d{1,2}))?)?"
    r"|(?:(?P<h>\d{1,6}):(?P<hm>\d{1,2}):(?P<hs>\d{1,2}))"
    r"|(?P<m>\d{1,8})(?::(?P<s>\d{1,2}))?)"
)
_MEMORY = re.compile(r"(\d{1,12})([KMGT]?)")
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_CLAIM = re.compile(r"[^:]+:/[^:\0]*")


@dataclass(frozen=True)
class SubmitRequest:
    """The script, and all options of the command with their help."""

    script: options.Script
    args: list[str] | None = options.SCRIPT_ARGS
    slurm: bool = option("A job of Slurm (sbatch).", False, "--slurm")
    k8s: bool = option("A job of Kubernetes (kubectl).", False, "--k8s")
    dry_run: bool = option("Print the job only.", False, "--dry-run")
    output: Path | None = option("Write the job to this file.", None, "-o")
    workers: options.Workers = 1
    strategy: options.Strategy = None
    seed: int | None = options.SEED
    device: options.Device = None
    nodes: int = option("Number of nodes, or of pods.", 1, min=1)
    gpus_per_node: int = option("GPUs of a node.", 0, min=0)
    gpus: int | None = option("Slurm: GPUs of all nodes together.", min=1)
    cpus: int | None = option("Cores of a worker.", min=1)
    memory: str | None = option("Memory of a node, such as 64G.")
    time: str | None = option("Time limit: minutes, HH:MM:SS or DAYS-HH:MM:SS.")
    job_name: str | None = option("Name of the job.", show_default="that of the script")
    env: list[str] | None = option("A variable; repeatable.", metavar="NAME=VALUE")
    checkpoint: str | None = options.CHECKPOINT
    requeue: bool | None = option(
        "Start again after a preemption.",
        None,
        "--requeue/--no-requeue",
        show_default="with --checkpoint",
    )
    max_restarts: int = option("Starts after crashes.", 0, min=0)
    notice: int = option("Seconds from the signal to the end.", 60, min=1, max=65535)
    python: str | None = option("The Python of workers.", show_default="this one; python in images")
    partition: str | None = option("Slurm: the partition.")
    account: str | None = option("Slurm: the account.")
    log: str | None = option("Slurm: file for the output.")
    line: list[str] | None = option(
        "Slurm: an option of sbatch more, --constraint=a100; repeatable."
    )
    setup: list[str] | None = option(
        "Slurm: a line of shell before srun, module load cuda; repeatable."
    )
    srun: list[str] | None = option(
        "Slurm: an option of srun, --container-image=IMAGE; repeatable."
    )
    secret_file: Path | None = option("Slurm: a file with the secret of the run, mode 0600.")
    image: str | None = option("Kubernetes: the image.")
    namespace: str | None = option("Kubernetes: the namespace.")
    secret: str | None = option(
        "Kubernetes: a Secret whose key `secret` has the secret of the run."
    )
    claim: list[str] | None = option(
        "Kubernetes: a volume claim; repeatable.", metavar="NAME:/PATH"
    )
    as_json: options.Json = False

    def __post_init__(self) -> None:
        if self.slurm == self.k8s:
            raise BadInput("give --slurm or --k8s: one of them")
        other = "Kubernetes: " if self.slurm else "Slurm: "
        for one in fields(self):
            if getattr(self, one.name) and options.help_of(one).startswith(other):
                named = one.name.replace("_", "-")
                chosen = "--slurm" if self.slurm else "--k8s"
                raise BadInput(f"--{named} means nothing to {chosen}: leave it out")
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
        for claim in self.claim or ():
            if _CLAIM.fullmatch(claim) is None:
                raise BadInput(f"--claim takes NAME:/PATH, not {claim!r}")

    @property
    def name(self) -> str:
        """Of the job."""
        return self.job_name or name_of(self.script)

    @property
    def workers_per_node(self) -> int | None:
        """None where nodes have different numbers."""
        return None if self.workers % self.nodes else self.workers // self.nodes

    @property
    def requeues(self) -> bool:
        """Whether it starts again after a preemption."""
        return self.checkpoint is not None if self.requeue is None else self.requeue

    @property
    def command(self) -> list[str]:
        """The program of every worker, with its arguments; an image has a script of its own."""
        if not self.k8s:
            program = command_for(self.script, list(self.args or ()))
        elif self.script in EXAMPLES:
            program = ["python", "-m", f"shoal.commands.examples.{self.script}", *(self.args or ())]
        else:
            program = ["python", self.script, *(self.args or ())]
        program[0] = self.python or program[0]
        if program[1].startswith("-") and program[1] == self.script:
            program[1] = f"./{self.script}"  # not an option of Python
        return program

    @cached_property
    def environ(self) -> dict[str, str]:
        """The variables of workers: Shoal's, and those that are given."""
        strategy = strategy_for(self.strategy, self.workers)
        strategy.check_hosts(self.workers, self.nodes > 1)
        config = RunConfig(strategy=str(strategy), seed=self.seed, device=self.device)
        if self.checkpoint is not None:
            folder, every = read_folder(OPTION_NAME, self.checkpoint)
            if self.k8s:  # folders of this machine are the same in the job, and not in an image
                folder = Path(self.checkpoint.rpartition(":every=")[0] or self.checkpoint)
            saves = CheckpointConfig(folder, every or CheckpointConfig().every)
            config = replace(config, checkpoint=saves)
        found = {name: text for name, text in config.to_environment().items() if text}
        if self.secret_file is not None:
            found[variable_name("secret_file")] = str(self.secret_file.absolute())
        return {**found, **read_variables(self.env or ())}

    def elastic_warning(self, launcher: str) -> str | None:
        """Launchers other than Shoal's end all workers with the first that is lost."""
        strategy = strategy_for(self.strategy, self.workers)
        lost = f"{strategy}: under {launcher} a lost worker ends the run, elastic or not"
        return lost if strategy.is_elastic else None

    def network_warning(self, has_key: bool, how: str) -> str | None:
        """Why hosts will not trust each other; `how` gives workers a key."""
        trust = f"--env {TRUSTED}=1"
        if self.nodes == 1 or read_variables(self.env or ()).get(TRUSTED) == "1":
            return None
        if self.gpus_per_node or self.gpus:
            return f"NCCL between {self.nodes} nodes takes {trust}: workers will end without it"
        if has_key:
            return None
        take = f"workers on {self.nodes} nodes take a key (`shoal keys new`, {how}) or {trust}"
        return f"{take}: they will end without either"


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
