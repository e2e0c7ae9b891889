"""`shoal submit`: a script as a job of Slurm or Kubernetes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.commands.submit_kubernetes import checkpoint_warning, manifest
from shoal.commands.submit_request import CHECKPOINT, MARK, TRUSTED, SubmitRequest
from shoal.commands.submit_slurm import slurm_script
from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import RunConfig
from shoal.runtime.files import write_atomically
from shoal.runtime.secret import read_secret_file
from shoal.runtime.wording import say


class SubmittedJob(NamedTuple):
    """A job as text, and what submits it."""

    text: str
    file_name: str
    command: Sequence[str]
    warnings: Sequence[str | None]


def _slurm_job(asked: SubmitRequest) -> SubmittedJob:
    if asked.secret_file is not None:
        read_secret_file(asked.secret_file)  # refuses one that workers would refuse
    text = slurm_script(asked)
    here = RunConfig.from_environment()  # sbatch passes the variables of this process on
    has_key = asked.secret_file is not None or here.read_secret() is not None
    is_trusted = here.tls.trusted_network or any(TRUSTED in line for line in asked.setup or ())
    network = None if is_trusted else asked.network_warning(has_key, "--secret-file FILE")
    warnings = (network, asked.elastic_warning("srun"))
    return SubmittedJob(text, f"{asked.name}.sbatch", ["sbatch"], warnings)


def _kubernetes_job(asked: SubmitRequest) -> SubmittedJob:
    if asked.image is None:
        raise BadInput("Kubernetes runs images: give --image one with Shoal and the script")
    text = manifest(asked)
    folder = asked.environ.get(CHECKPOINT)
    lost = None if folder is None else checkpoint_warning(folder, asked.claim or ())
    network = asked.network_warning(asked.secret is not None, "--secret NAME")
    warnings = (network, lost, asked.elastic_warning("Kubernetes"))
    return SubmittedJob(text, f"{asked.name}.json", ["kubectl", "create", "-f"], warnings)


def submit(request: SubmitRequest) -> None:
    """Write a script's job for Slurm or Kubernetes, and submit it."""
    job = _slurm_job(request) if request.slurm else _kubernetes_job(request)
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
