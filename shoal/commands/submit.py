"""`shoal submit`: a script as a job of Slurm or Kubernetes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple, get_type_hints

import typer

from shoal.commands import options
from shoal.commands.launching import EXAMPLES, command_for, strategy_for
from shoal.errors import BadInput, ShoalError
from shoal.launch.here.checkpoint_option import OPTION_NAME, read_folder
from shoal.launch.managers.kubernetes import KubernetesOptions, checkpoint_warning, manifest
from shoal.launch.managers.slurm_script import SlurmOptions, slurm_script
from shoal.launch.managers.submit_spec import MARK, SubmitSpec, name_of, read_variables
from shoal.runtime.config import CheckpointConfig, RunConfig, TlsConfig, variable_name
from shoal.runtime.files import write_atomically
from shoal.runtime.secret import read_secret_file
from shoal.runtime.wording import say

TRUSTED = variable_name("trusted_network", TlsConfig)
CHECKPOINT = variable_name("folder", CheckpointConfig)
_Text = str | None
_Texts = list[str] | None
_Number = int | None


class SubmittedJob(NamedTuple):
    """A job as text, and what submits it."""

    text: str
    file_name: str
    command: Sequence[str]
    warnings: Sequence[str | None]


@dataclass(frozen=True)
class SubmitRequest:
    """The script, and all options of the command with their help."""

    script: options.Script
    args: options.ScriptArgs = None
    slurm: Annotated[bool, typer.Option("--slurm", help="A job of Slurm (sbatch).")] = False
    k8s: Annotated[bool, typer.Option("--k8s", help="A job of Kubernetes (kubectl).")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job only.")] = False
    output: Annotated[Path | None, typer.Option("-o", help="Write the job to this file.")] = None
    workers: options.Workers = 1
    strategy: options.Strategy = None
    seed: options.Seed = None
    device: options.Device = None
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes, or of pods.")] = 1
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of a node.")] = 0
    gpus: Annotated[_Number, typer.Option(min=1, help="Slurm: GPUs of all nodes together.")] = None
    cpus: Annotated[_Number, typer.Option(min=1, help="Cores of a worker.")] = None
    memory: Annotated[_Text, typer.Option(help="Memory of a node, such as 64G.")] = None
    time: Annotated[_Text, typer.Option(help="Time limit: minutes, HH:MM:SS or DAYS-HH:MM:SS.")] = (
        None
    )
    job_name: Annotated[
        _Text, typer.Option(help="Name of the job.", show_default="that of the script")
    ] = None
    env: Annotated[_Texts, typer.Option(metavar="NAME=VALUE", help="A variable; repeatable.")] = (
        None
    )
    checkpoint: options.Checkpoint = None
    requeue: Annotated[
        bool | None,
        typer.Option(
            "--requeue/--no-requeue",
            help="Start again after a preemption.",
            show_default="with --checkpoint",
        ),
    ] = None
    max_restarts: Annotated[int, typer.Option(min=0, help="Starts after crashes.")] = 0
    notice: Annotated[
        int, typer.Option(min=1, max=65535, help="Seconds from the signal to the end.")
    ] = 60
    python: Annotated[
        _Text,
        typer.Option(help="The Python of workers.", show_default="this one; python in images"),
    ] = None
    partition: Annotated[_Text, typer.Option(help="Slurm: the partition.")] = None
    account: Annotated[_Text, typer.Option(help="Slurm: the account.")] = None
    log: Annotated[_Text, typer.Option(help="Slurm: file for the output.")] = None
    line: Annotated[
        _Texts, typer.Option(help="Slurm: an option of sbatch more, --constraint=a100; repeatable.")
    ] = None
    setup: Annotated[
        _Texts,
        typer.Option(help="Slurm: a line of shell before srun, module load cuda; repeatable."),
    ] = None
    srun: Annotated[
        _Texts, typer.Option(help="Slurm: an option of srun, --container-image=IMAGE; repeatable.")
    ] = None
    secret_file: Annotated[
        Path | None, typer.Option(help="Slurm: a file with the secret of the run, mode 0600.")
    ] = None
    image: Annotated[_Text, typer.Option(help="Kubernetes: the image.")] = None
    namespace: Annotated[_Text, typer.Option(help="Kubernetes: the namespace.")] = None
    secret: Annotated[
        _Text,
        typer.Option(help="Kubernetes: a Secret whose key `secret` has the secret of the run."),
    ] = None
    claim: Annotated[
        _Texts, typer.Option(metavar="NAME:/PATH", help="Kubernetes: a volume claim; repeatable.")
    ] = None
    as_json: options.Json = False

    def job(self) -> SubmittedJob:
        """Checked; BadInput for an option of the other cluster manager."""
        if self.slurm == self.k8s:
            raise BadInput("give --slurm or --k8s: one of them")
        other = "Kubernetes: " if self.slurm else "Slurm: "
        for name, hint in get_type_hints(SubmitRequest, include_extras=True).items():
            if getattr(self, name) and str(hint.__metadata__[0].help).startswith(other):
                option, chosen = name.replace("_", "-"), "--slurm" if self.slurm else "--k8s"
                raise BadInput(f"--{option} means nothing to {chosen}: leave it out")
        return self._slurm_job() if self.slurm else self._kubernetes_job()

    def _slurm_job(self) -> SubmittedJob:
        if self.secret_file is not None:
            read_secret_file(self.secret_file)  # refuses one that workers would refuse
        setup = tuple(self.setup or ())
        lines = (tuple(self.line or ()), setup, tuple(self.srun or ()))
        asked = SlurmOptions(self.partition, self.account, self.log, self.gpus, *lines)
        spec = self._spec()
        text = slurm_script(spec, asked)
        here = RunConfig.from_environment()  # sbatch passes the variables of this process on
        has_key = self.secret_file is not None or here.read_secret() is not None
        is_trusted = here.tls.trusted_network or any(TRUSTED in line for line in setup)
        network = None if is_trusted else self._network_warning(has_key, "--secret-file FILE")
        warnings = (network, self._elastic_warning("srun"))
        return SubmittedJob(text, f"{spec.name}.sbatch", ["sbatch"], warnings)

    def _kubernetes_job(self) -> SubmittedJob:
        if self.image is None:
            raise BadInput("Kubernetes runs images: give --image one with Shoal and the script")
        asked = KubernetesOptions(self.image, self.namespace, self.secret, tuple(self.claim or ()))
        spec = self._spec()
        text = manifest(spec, asked)
        folder = spec.environ.get(CHECKPOINT)
        lost = None if folder is None else checkpoint_warning(folder, asked)
        network = self._network_warning(self.secret is not None, "--secret NAME")
        warnings = (network, lost, self._elastic_warning("Kubernetes"))
        return SubmittedJob(text, f"{spec.name}.json", ["kubectl", "create", "-f"], warnings)

    def _spec(self) -> SubmitSpec:
        variables = self._variables()
        if self.secret_file is not None:
            variables[variable_name("secret_file")] = str(self.secret_file.absolute())
        return SubmitSpec(
            command=tuple(self._command()),
            workers=self.workers,
            name=self.job_name or name_of(self.script),
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            cpus=self.cpus,
            memory=self.memory,
            time=self.time,
            environ={**variables, **read_variables(self.env or ())},
            requeue=self.checkpoint is not None if self.requeue is None else self.requeue,
            restarts=self.max_restarts,
            notice_s=self.notice,
        )

    def _command(self) -> list[str]:
        """In an image the script is not that of this host."""
        if not self.k8s:
            program = command_for(self.script, list(self.args or ()))
        elif self.script in EXAMPLES:
            program = ["python", "-m", f"shoal.examples.{self.script}", *(self.args or ())]
        else:
            program = ["python", self.script, *(self.args or ())]
        program[0] = self.python or program[0]
        if program[1].startswith("-") and program[1] == self.script:
            program[1] = f"./{self.script}"  # not an option of Python
        return program

    def _variables(self) -> dict[str, str]:
        """Those of Shoal."""
        strategy = strategy_for(self.strategy, self.workers)
        strategy.check_hosts(self.workers, self.nodes > 1)
        config = RunConfig(strategy=str(strategy), seed=self.seed, device=self.device)
        if self.checkpoint is not None:
            folder, every = read_folder(OPTION_NAME, self.checkpoint)
            if self.k8s:  # folders of this machine are the same in the job, and not in an image
                folder = Path(self.checkpoint.rpartition(":every=")[0] or self.checkpoint)
            saves = CheckpointConfig(folder, every or CheckpointConfig().every)
            config = replace(config, checkpoint=saves)
        return {name: text for name, text in config.to_environment().items() if text}

    def _elastic_warning(self, launcher: str) -> str | None:
        """Launchers other than Shoal's end all workers with the first that is lost."""
        strategy = strategy_for(self.strategy, self.workers)
        lost = f"{strategy}: under {launcher} a lost worker ends the run, elastic or not"
        return lost if strategy.is_elastic else None

    def _network_warning(self, has_key: bool, how: str) -> str | None:
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


@options.with_fields
def submit(request: SubmitRequest) -> None:
    """Write a script's job for Slurm or Kubernetes, and submit it."""
    job = request.job()
    for warning in filter(None, job.warnings):
        say(warning)
    if request.dry_run:
        print(json.dumps({"text": job.text}) if request.as_json else job.text.rstrip("\n"))
        return
    file = _write(job.text, request.output, job.file_name)
    answer = _send(job.command, file)
    submitted = {"file": str(file), "command": [*job.command, str(file)], "answer": answer.strip()}
    print(json.dumps(submitted) if request.as_json else answer.rstrip("\n"))


def _write(text: str, file: Path | None, default: str) -> Path:
    """Where the text was written; a file of another origin is not replaced unless it is named."""
    path = file or Path(default)
    if file is None and path.exists() and MARK not in path.read_text(errors="replace"):
        raise BadInput(f"{path} was not written by shoal submit: name another file with -o FILE")
    try:
        write_atomically(path, text)
    except OSError as error:
        raise BadInput(f"cannot write the job to {path}: {error.strerror}") from error
    return path


def _send(command: Sequence[str], path: Path) -> str:
    """Run `command` with the file, and return what it has printed; its errors go to stderr."""
    program = command[0]
    if shutil.which(program) is None:
        words = shlex.join([*command, str(path)])
        raise BadInput(f"there is no {program} here; the job is in {path}: submit it with {words}")
    asked = [*command, str(path.absolute())]
    done = subprocess.run(asked, check=False, stdout=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        status = f"exit status {done.returncode}"
        raise ShoalError(f"{program} has refused the job ({status}); it is in {path}")
    return done.stdout
