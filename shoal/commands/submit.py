"""`shoal submit`: a script as a job of Slurm or Kubernetes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.commands import options
from shoal.commands import submit_options as given
from shoal.commands.submit_request import (
    CHECKPOINT,
    TRUSTED,
    SubmitRequest,
    network_warning,
    refuse_others,
)
from shoal.errors import BadInput
from shoal.launch.submit.kubernetes import KINDS, KubernetesOptions, checkpoint_warning, manifest
from shoal.launch.submit.send import submit_file, write_job
from shoal.launch.submit.slurm_script import SlurmOptions, slurm_script
from shoal.runtime.config import RunConfig
from shoal.runtime.secret import read_secret_file


def submit(
    script: options.Script,
    args: options.ScriptArgs = None,
    slurm: given.Slurm = False,
    k8s: given.Kubernetes = False,
    dry_run: given.DryRun = False,
    output: given.Output = None,
    workers: options.Workers = 1,
    strategy: options.Strategy = None,
    seed: options.Seed = None,
    device: options.Device = None,
    nodes: given.Nodes = 1,
    gpus_per_node: given.GpusPerNode = 0,
    gpus: given.Gpus = None,
    cpus: given.Cpus = None,
    memory: given.Memory = None,
    time: given.Time = None,
    job_name: given.JobName = None,
    env: given.Env = None,
    checkpoint: options.Checkpoint = None,
    requeue: given.Requeue = None,
    max_restarts: given.MaxRestarts = 0,
    notice: given.Notice = 60,
    python: given.Python = None,
    partition: given.Partition = None,
    account: given.Account = None,
    log: given.Log = None,
    line: given.Line = None,
    setup: given.Setup = None,
    srun: given.Srun = None,
    secret_file: given.SecretFile = None,
    image: given.Image = None,
    namespace: given.Namespace = None,
    kind: given.Kind = KINDS[0],
    secret: given.Secret = None,
    claim: given.Claim = None,
    as_json: options.Json = False,
) -> None:
    """Write a script's job for Slurm or Kubernetes, and submit it."""
    if slurm == k8s:
        raise BadInput("give --slurm or --k8s: one of them")
    for_slurm: dict[str, object] = {
        "--partition": partition,
        "--account": account,
        "--log": log,
        "--line": line,
        "--srun": srun,
    }
    for_slurm |= {"--setup": setup, "--secret-file": secret_file, "--gpus": gpus}
    for_k8s = {"--image": image, "--namespace": namespace, "--secret": secret, "--claim": claim}
    refuse_others("--slurm" if slurm else "--k8s", for_k8s if slurm else for_slurm)
    request = SubmitRequest(
        script=script,
        args=args or (),
        workers=workers,
        strategy=strategy,
        seed=seed,
        device=device,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus=cpus,
        memory=memory,
        time=time,
        job_name=job_name,
        env=env or (),
        checkpoint=checkpoint,
        requeue=requeue,
        restarts=max_restarts,
        notice_s=notice,
        python=python,
    )
    if slurm:
        lines = (tuple(line or ()), tuple(setup or ()), tuple(srun or ()))
        asked = SlurmOptions(partition, account, log, gpus, *lines)
        job = _slurm(request, asked, secret_file)
    elif image is None:
        raise BadInput("Kubernetes runs images: give --image one with Shoal and the script")
    else:
        pods = KubernetesOptions(image, namespace, kind, secret, tuple(claim or ()))
        job = _kubernetes(request, pods)
    for warning in filter(None, job.warnings):
        print(f"shoal: {warning}", file=sys.stderr)
    if dry_run:
        print(json.dumps({"text": job.text}) if as_json else job.text.rstrip("\n"))
        return
    file = write_job(job.text, output, job.file_name)
    answer = submit_file(job.command, file)
    submitted = {"file": str(file), "command": [*job.command, str(file)], "answer": answer.strip()}
    print(json.dumps(submitted) if as_json else answer.rstrip("\n"))


class _Job(NamedTuple):
    """A job as text, and what submits it."""

    text: str
    file_name: str
    command: Sequence[str]
    warnings: Sequence[str | None]


def _slurm(request: SubmitRequest, asked: SlurmOptions, secret_file: Path | None) -> _Job:
    if secret_file is not None:
        read_secret_file(secret_file)  # refuses one that workers would refuse
    spec = request.spec(is_in_image=False, secret_file=secret_file)
    text = slurm_script(spec, asked)
    here = RunConfig.from_environment()  # sbatch passes the variables of this process on
    has_key = secret_file is not None or here.read_secret() is not None
    is_trusted = here.tls.trusted_network or any(TRUSTED in line for line in asked.setup)
    uses_gpus = bool(spec.gpus_per_node or asked.gpus)
    network = network_warning(spec, has_key, is_trusted, uses_gpus, "--secret-file FILE")
    warnings = (network, request.elastic_warning("srun"))
    return _Job(text, f"{spec.name}.sbatch", ["sbatch"], warnings)


def _kubernetes(request: SubmitRequest, asked: KubernetesOptions) -> _Job:
    spec = request.spec(is_in_image=True)
    text = manifest(spec, asked)
    uses_gpus = bool(spec.gpus_per_node)
    network = network_warning(spec, asked.secret is not None, False, uses_gpus, "--secret NAME")
    folder = spec.environ.get(CHECKPOINT)
    lost = None if folder is None else checkpoint_warning(folder, asked)
    warnings = (network, lost, request.elastic_warning("Kubernetes"))
    return _Job(text, f"{spec.name}.json", ["kubectl", "create", "-f"], warnings)
