"""Options of `shoal submit` with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.launch.submit.kubernetes import KINDS

# ---------------------------------------------------------------------- the job

Slurm = Annotated[bool, typer.Option("--slurm", help="A job of Slurm (sbatch).")]
Kubernetes = Annotated[bool, typer.Option("--k8s", help="A job of Kubernetes (kubectl).")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job only.")]
Output = Annotated[Path | None, typer.Option("-o", help="Write the job to this file.")]
Nodes = Annotated[int, typer.Option(min=1, help="Number of nodes, or of pods.")]
GpusPerNode = Annotated[int, typer.Option(min=0, help="GPUs of a node.")]
Cpus = Annotated[int | None, typer.Option(min=1, help="Cores of a worker.")]
Memory = Annotated[str | None, typer.Option(help="Memory of a node, such as 64G.")]
Time = Annotated[str | None, typer.Option(help="Time limit: minutes, HH:MM:SS or DAYS-HH:MM:SS.")]
JobName = Annotated[
    str | None, typer.Option(help="Name of the job.", show_default="that of the script")
]
Env = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable; repeatable.")
]
Requeue = Annotated[
    bool | None,
    typer.Option(
        "--requeue/--no-requeue",
        help="Start again after a preemption.",
        show_default="with --checkpoint",
    ),
]
MaxRestarts = Annotated[int, typer.Option(min=0, help="Starts after crashes.")]
Notice = Annotated[int, typer.Option(min=1, max=65535, help="Seconds from the signal to the end.")]
Python = Annotated[
    str | None,
    typer.Option(help="The Python of workers.", show_default="this one; python in images"),
]

# ---------------------------------------------------------------------- Slurm alone

Gpus = Annotated[int | None, typer.Option(min=1, help="Slurm: GPUs of all nodes together.")]
Partition = Annotated[str | None, typer.Option(help="Slurm: the partition.")]
Account = Annotated[str | None, typer.Option(help="Slurm: the account.")]
Log = Annotated[str | None, typer.Option(help="Slurm: file for the output.")]
Line = Annotated[
    list[str] | None,
    typer.Option(help="Slurm: an option of sbatch more, --constraint=a100; repeatable."),
]
Setup = Annotated[
    list[str] | None,
    typer.Option(help="Slurm: a line of shell before srun, module load cuda; repeatable."),
]
Srun = Annotated[
    list[str] | None,
    typer.Option(help="Slurm: an option of srun, --container-image=IMAGE; repeatable."),
]
SecretFile = Annotated[
    Path | None, typer.Option(help="Slurm: a file with the secret of the run, mode 0600.")
]

# ---------------------------------------------------------------------- Kubernetes alone

Image = Annotated[str | None, typer.Option(help="Kubernetes: the image.")]
Namespace = Annotated[str | None, typer.Option(help="Kubernetes: the namespace.")]
Kind = Annotated[str, typer.Option(help=f"Kubernetes: {' or '.join(KINDS)}.")]
Secret = Annotated[
    str | None,
    typer.Option(help="Kubernetes: a Secret whose key `secret` has the secret of the run."),
]
Claim = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME:/PATH", help="Kubernetes: a volume claim; repeatable."),
]
