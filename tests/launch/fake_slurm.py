"""sbatch, srun and scontrol for one machine: enough of Slurm to run a job and to requeue it.

A job is one folder. Files in it are requests: `requeue` for another start, `signal` for the one
that `--signal` names, `preempt` for SIGTERM and, with `--requeue`, another start.
"""

from __future__ import annotations

import os
import stat
import sys
import textwrap
from pathlib import Path

_SBATCH = """
import os, re, signal, subprocess, sys, time
script = sys.argv[1]
lines = [l.split(None, 1)[1].strip() for l in open(script) if l.startswith("#SBATCH")]
options = dict(l.lstrip("-").partition("=")[::2] for l in lines)
print("Submitted batch job 17", flush=True)
for restart in range(5):
    env = dict(os.environ, SLURM_JOB_ID="17", SLURM_NTASKS=options["ntasks"], SLURM_PROCID="0")
    if restart:
        env["SLURM_RESTART_COUNT"] = str(restart)
    batch = subprocess.Popen(["bash", script], env=env)
    while batch.poll() is None:
        if os.path.exists("signal") and "signal" in options:
            os.remove("signal")
            batch.send_signal(getattr(signal, "SIG" + re.match(r"B:(\\w+)@", options["signal"])[1]))
        if os.path.exists("preempt"):
            os.rename("preempt", "requeue" if "requeue" in options else "preempted")
            batch.terminate()
        time.sleep(0.02)
    if not os.path.exists("requeue"):
        sys.exit(batch.returncode)
    os.remove("requeue")
"""
_SRUN = """
import os, signal, subprocess, sys
command = sys.argv[2:]
size = int(os.environ["SLURM_NTASKS"])
restart = int(os.environ.get("SLURM_RESTART_COUNT", 0))
def start(rank):
    step = dict(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS=str(size), SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank), SLURM_NODEID="0", SLURM_STEP_TASKS_PER_NODE=str(size),
                SLURM_STEP_NODELIST="localhost")
    return subprocess.Popen(command, env=dict(os.environ, **step))
tasks = [start(rank) for rank in range(size)]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda n, _: [task.send_signal(n) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
_SCONTROL = """
import sys
assert sys.argv[1:] == ["requeue", "17"]
open("requeue", "w").close()
"""


def install(folder: Path) -> str:
    """Write the three programs; returns PATH with them."""
    folder.mkdir()
    for name, text in (("sbatch", _SBATCH), ("srun", _SRUN), ("scontrol", _SCONTROL)):
        program = folder / name
        program.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
