"""Another user of the host beside a run: nothing lets it in, and it stops nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.scripts import HEAD

ROOT = Path(__file__).parents[1]
SCRIPT = f"""{HEAD}
def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for number, batch in enumerate(job.batches(data, batch_size=20, epochs=2)):
        value = step(batch)
        if number == 2 and job.rank == 0 and "GATE" in os.environ:
            print("ready", flush=True)
            open(os.environ["GATE"]).read()  # until the test opens it
        job.barrier()
    if job.rank == 0:
        print("loss", float(value).hex(), flush=True)

if __name__ == "__main__":
    shoal.run(train, strategy=os.environ["SHOAL_STRATEGY"])
"""
PYTHON = sys.executable
Target = tuple[str | int, ...]  # see stranger.py
LAUNCHERS = {
    "torchrun": [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                 "--standalone"],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", PYTHON],
    "shoal run": [PYTHON, "-m", "shoal", "run", "-n", "2"],
}  # fmt: skip


def tree_of(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree_of(int(child))


def targets_of(pids: list[int], temporary: Path) -> Iterator[Target]:
    """What the processes listen at, their memory, and the files that they have written."""
    owners: dict[str, int] = {}
    for pid in pids:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                name = os.readlink(link)
                owners.setdefault(name, pid)
                if "memfd:" in name:
                    yield "file", str(link)
            yield "file", f"/proc/{pid}/mem"
            yield "file", f"/proc/{pid}/environ"
    for table, host in (("tcp", "127.0.0.1"), ("tcp6", "::1")):
        for words in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:]):
            if words[3] == "0A" and (owner := owners.get(f"socket:[{words[9]}]")):
                is_store = b"torch.distributed.run" in Path(f"/proc/{owner}/cmdline").read_bytes()
                yield "store" if is_store else "tcp", host, int(words[1].rpartition(":")[2], 16)
    for words in map(str.split, Path("/proc/net/unix").read_text().splitlines()[1:]):
        if len(words) > 7 and words[5] == "01" and f"socket:[{words[6]}]" in owners:
            yield "unix", words[7]
    for path in [*temporary.rglob("*"), *Path("/dev/shm").glob("*shoal*")]:
        with suppress(OSError):  # removed meanwhile
            if not path.name.startswith("torch") and path.owner() == "root":  # torch's caches
                yield "file", str(path)


def loss_of(out: str) -> str:
    (found,) = re.findall(r"loss (\S+)", out)
    return str(found)


@contextmanager
def another_user(environ: dict[str, str]) -> Iterator[Callable[[set[Target]], list[str]]]:
    """Yields a function that lets it try targets; returns what let it in."""
    with subprocess.Popen(
        [PYTHON, "-m", "tests.stranger"], env=environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as stranger:  # fmt: skip
        asked, answers = stranger.stdin, stranger.stdout
        assert asked is not None and answers is not None

        def answer() -> list[str]:
            lines = list(iter(answers.readline, ".\n")) if stranger.poll() is None else [""]
            assert "" not in lines, "the stranger has failed"
            return lines

        def attempt(targets: set[Target]) -> list[str]:
            entered = []
            for target in sorted(targets, key=str):
                print(json.dumps(target), file=asked, flush=True)
                entered += answer()
            return entered

        assert not answer()
        yield attempt
        asked.close()


@pytest.mark.whole
@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("strategy", ["ddp", "ps(servers=1)"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_another_user_gets_in_nowhere_and_stops_nothing(launcher: str, strategy: str) -> None:
    if shutil.which(LAUNCHERS[launcher][0]) is None:
        pytest.skip(f"there is no {launcher}")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home, temporary = Path(folder, "home"), Path(folder, "tmp")
        os.chmod(folder, 0o755)
        for path, mode in ((home, 0o755), (temporary, 0o1777)):
            path.mkdir()
            path.chmod(mode)
        (script := home / "train.py").write_text(SCRIPT)
        os.mkfifo(gate := home / "gate", 0o600)
        environ = {
            **{"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "SHOAL_STRATEGY": strategy},
            **{"HOME": str(home), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
            **{key: value for key, value in os.environ.items() if key.startswith("OMPI_MCA_")},
        }
        command = [*LAUNCHERS[launcher], str(script)]
        alone = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert alone.returncode == 0, alone.stderr
        shutil.rmtree(temporary / "shoal-0", ignore_errors=True)
        tried: set[Target] = set()
        entered: list[str] = []
        output = Path(folder, "output")
        with another_user(environ) as attempt, output.open("w") as file, subprocess.Popen(
            command, env={**environ, "GATE": str(gate)}, stdout=file, stderr=subprocess.STDOUT
        ) as run:  # fmt: skip
            try:
                is_open = False
                while run.poll() is None:
                    is_ready = "ready" in output.read_text()
                    new = set(targets_of(list(tree_of(run.pid)), temporary)) - tried
                    entered += attempt(new)
                    tried |= new
                    if is_ready and not is_open:
                        is_open = True
                        gate.write_text("go")
                    with suppress(subprocess.TimeoutExpired):
                        run.wait(0.05)
            finally:
                run.kill()
        said = output.read_text()
        assert run.returncode == 0, said
        assert loss_of(said) == loss_of(alone.stdout)
        assert not entered
        assert {kind for kind, *_ in tried} >= {"file"}, tried
