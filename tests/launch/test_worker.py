from __future__ import annotations

import json
import os
import subprocess
import sys

from shoal.launch.worker import open_progress
from tests.launch.helpers import ROOT


def test_nobody_listens_to_progress() -> None:
    assert open_progress({}) is None


def test_progress_is_a_json_line_and_never_waits() -> None:
    read, write = os.pipe()
    send = open_progress({"SHOAL_PROGRESS_FD": str(write)})
    assert send is not None
    send({"step": 1, "metrics": {"loss": 0.5}})
    assert json.loads(os.read(read, 1000)) == {"step": 1, "metrics": {"loss": 0.5}}
    for step in range(50):
        send({"step": step, "pad": "x" * 5000})  # more than a pipe holds
    torn = os.read(read, 2**20)
    send({"step": 99})
    assert json.loads((torn + os.read(read, 1000)).splitlines()[-1]) == {"step": 99}
    os.close(read)
    send({"step": 100})
    os.close(write)


def test_a_worker_whose_launcher_is_gone_ends() -> None:
    script = "from shoal.launch.worker import die_with_launcher; die_with_launcher(); print('on')"
    base = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL")}
    for session, launcher, output in (
        (True, "1", b""),  # a worker that was adopted
        (True, str(os.getpid()), b"on\n"),
        (False, "1", b"on\n"),  # behind a wrapper
        (True, None, b"on\n"),
    ):
        env = {**base, "PYTHONPATH": str(ROOT)}
        if launcher is not None:
            env["SHOAL_LAUNCHER_PID"] = launcher
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE,
            start_new_session=session, check=False,
        )  # fmt: skip
        assert done.stdout == output


def test_the_launcher_does_not_load_torch() -> None:
    names = "environment failures local output rendezvous slurm processes supervisor worker"
    script = f"import sys\nfor n in {names.split()}: __import__('shoal.launch.' + n)\n"
    script += "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
