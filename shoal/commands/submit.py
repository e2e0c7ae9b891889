"""`shoal submit`: a script as a job of Slurm or Kubernetes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shoal.commands import options
from shoal.commands.launching import EXAMPLES, command_for, strategy_for
from shoal.errors import BadInput
from shoal.launch.checkpoint_option import OPTION_NAME, read_folder
from shoal.launch.submit.kubernetes import KINDS, KubernetesOptions, manifest
from shoal.launch.submit.send import submit_file, write_job
from shoal.launch.submit.slurm_script import SlurmOptions, slurm_script
from shoal.launch.submit.spec import SubmitSpec, name_of, read_variables
from shoal.runtime.config import CheckpointConfig, RunConfig, variable_name


def submit(
    script: options.Script,
    args: options.ScriptArgs = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="A job of Slurm (sbatch).")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="A job of Kubernetes (kubectl).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job only.")] = False,
    output: Annotated[Path | None, typer.Option("-o", help="Write the job to this file.")] = None,
    workers: options.Workers = 1,
    strategy: options.Strategy = None,
    seed: options.Seed = None,
    device: options.Device = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes, or of pods.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of a node.")] = 0,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of all nodes together.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Cores of a worker.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a node, such as 64G.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit: minutes, HH:MM:SS or DAYS-HH:MM:SS.")
    ] = None,
    job_name: Annotated[
        str | None, typer.Option(help="Name of the job.", show_default="that of the script")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable; repeatable.")
    ] = None,
    checkpoint: options.Checkpoint = None,
    requeue: Annotated[
        bool | None,
        typer.Option(
            "--requeue/--no-requeue",
            help="Start again after a preemption.",
            show_default="with --checkpoint",
        ),
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Starts after crashes.")] = 0,
    notice: Annotated[
        int, typer.Option(min=1, max=65535, help="Seconds from the signal to the end.")
    ] = 60,
    python: Annotated[
        str | None,
        typer.Option(help="The Python of workers.", show_default="this one; python in images"),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm: the partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm: the account.")] = None,
    log: Annotated[str | None, typer.Option(help="Slurm: file for the output.")] = None,
    line: Annotated[
        list[str] | None,
        typer.Option(help="Slurm: an option of sbatch more, --constraint=a100; repeatable."),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="Slurm: a line of shell before srun, module load cuda; repeatable."),
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="Slurm: a file with the secret of the run, mode 0600.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Kubernetes: the image.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Kubernetes: the namespace.")] = None,
    kind: Annotated[str, typer.Option(help=f"Kubernetes: {' or '.join(KINDS)}.")] = KINDS[0],
    secret: Annotated[
        str | None,
        typer.Option(help="Kubernetes: a Secret whose key `secret` has the secret of the run."),
    ] = None,
    claim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:/PATH", help="Kubernetes: a volume claim; repeatable."),
    ] = None,
) -> None:
    """Write a script's job for Slurm or Kubernetes, and submit it."""
    if slurm == k8s:
        raise BadInput("give --slurm or --k8s: one of them")
    _refuse_others(
        "--slurm" if slurm else "--k8s",
        {
            "--partition": (partition, slurm),
            "--account": (account, slurm),
            "--log": (log, slurm),
            "--line": (line, slurm),
            "--setup": (setup, slurm),
            "--secret-file": (secret_file, slurm),
            "--gpus": (gpus, slurm),
            "--image": (image, k8s),
            "--namespace": (namespace, k8s),
            "--secret": (secret, k8s),
            "--claim": (claim, k8s),
        },
    )
    program = command_for(script, args) if slurm else _command_in_image(script, args)
    program[0] = python or program[0]
    if program[1].startswith("-") and program[1] == script:
        program[1] = f"./{script}"  # not an option of Python
    variables = _variables(workers, strategy, seed, device, checkpoint, slurm)
    if secret_file is not None:
        variables[variable_name("secret_file")] = str(secret_file.absolute())
    spec = SubmitSpec(
        command=tuple(program),
        workers=workers,
        name=job_name or name_of(script),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus=cpus,
        memory=memory,
        time=time,
        environ={**variables, **read_variables(env or [])},
        requeue=checkpoint is not None if requeue is None else requeue,
        restarts=max_restarts,
        notice_s=notice,
    )
    if slurm:
        asked = SlurmOptions(partition, account, log, gpus, tuple(line or ()), tuple(setup or ()))
        text = slurm_script(spec, asked)
    else:
        if image is None:
            raise BadInput("Kubernetes runs images: give --image one with Shoal and the script")
        text = manifest(spec, KubernetesOptions(image, namespace, kind, secret, tuple(claim or ())))
    if dry_run:
        print(text, end="")
        return
    file = write_job(text, output, f"{spec.name}.{'sbatch' if slurm else 'json'}")
    submit_file(["sbatch"] if slurm else ["kubectl", "create", "-f"], file)


def _refuse_others(chosen: str, given: dict[str, tuple[object, bool]]) -> None:
    for option, (value, is_known) in given.items():
        if value and not is_known:
            raise BadInput(f"{option} means nothing to {chosen}: leave it out")


def _command_in_image(script: str, args: list[str] | None) -> list[str]:
    """The script is in the image, and not here."""
    if script in EXAMPLES:
        return ["python", "-m", f"shoal.examples.{script}", *(args or [])]
    return ["python", script, *(args or [])]


def _variables(
    workers: int,
    strategy: str | None,
    seed: int | None,
    device: str | None,
    checkpoint: str | None,
    is_here: bool,
) -> dict[str, str]:
    """Those of Shoal. Folders of this machine are the same in the job, and not in an image."""
    config = RunConfig(
        strategy=str(strategy_for(strategy, workers)),
        seed=seed,
        device=device,
    )
    if checkpoint is not None:
        folder, every = read_folder(OPTION_NAME, checkpoint)
        if not is_here:
            folder = Path(checkpoint.rpartition(":every=")[0] or checkpoint)
        asked = CheckpointConfig(folder, every or CheckpointConfig().every)
        config = replace(config, checkpoint=asked)
    return {name: text for name, text in config.to_environment().items() if text}
