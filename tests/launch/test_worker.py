from __future__ import annotations

import os
import subprocess
import sys

from shoal.launch.here import local
from shoal.launch.hosts import remote
from shoal.launch.rank import environment, rendezvous
from tests.launch.helpers import DIE_WITH_LAUNCHER, ROOT


def test_a_worker_whose_launcher_has_exited_ends() -> None:
    script = f"{DIE_WITH_LAUNCHER}print('on')"
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
    names = [environment, local, remote, rendezvous]
    script = f"import sys\nfor n in {[name.__name__ for name in names]}: __import__(n)\n"
    script += "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_server_waits_for_nothing_before_it_can_die_with_its_launcher() -> None:
    script = "import sys, shoal.server.main; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
