"""A worker loads what it uses: strategies, servers and the planner are found by name.

So does the command line: the list of commands is printed without loading any.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from shoal.commands.cli import COMMANDS, build_app
from tests import scripts

SCRIPT = scripts.PLAIN.replace(
    "if __name__",
    """    job.print("loaded", *sorted(name for name in sys.modules if name.startswith("shoal.")))

if __name__""",
)


@pytest.mark.whole
def test_a_ddp_worker_has_loaded_at_most_170_modules_after_its_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "-s", "ddp", str(script)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in shown.splitlines() if " loaded " in line]
    loaded = line.split(" loaded ")[1].split()
    assert len(loaded) <= 170
    elsewhere = ("plan", "cluster", "server", "commands")
    assert not [name for name in loaded if name.split(".")[1] in elsewhere]


IMPORTED = """
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad
from torch.optim import optimizer

def changeable():
    yield from (dist.monitored_barrier, dist.distributed_c10d.monitored_barrier)
    yield torch.nn.parallel.DistributedDataParallel._register_builtin_comm_hook
    yield from (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_)
    yield torch.amp.GradScaler.unscale_
    yield from optimizer._global_optimizer_pre_hooks.values()

before = list(changeable())
import shoal, shoal.train.job, shoal.comm.torch_backend.process_group, shoal.train.own_loop.setup
shoal.register_backend()
assert list(changeable()) == before
"""


def test_an_import_changes_nothing_of_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORTED], check=True)


HEAVY = ("torch", "numpy", "networkx", "ray", "shoal.commands.run")
LOADED = """
import sys
from shoal.commands.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sys.modules.keys() & set(%r), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], set()),
        (["--version"], set()),
        (["rnu"], set()),
        (["run", "--help"], {"shoal.commands.run"}),
        (["run", "-n", "1", "nothing.py"], {"shoal.commands.run"}),
        (["ps"], set()),
    ],
)
def test_the_command_line_loads_the_command_that_is_given(
    words: list[str], heavy: set[str]
) -> None:
    command = [sys.executable, "-c", LOADED % (HEAVY,), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == str(heavy)


def test_the_list_of_commands_says_what_they_say_themselves() -> None:
    listed, loaded = (
        typer.main.get_command(app) for app in (build_app((), COMMANDS), build_app(COMMANDS))
    )
    for name in COMMANDS:
        lines = [group.commands[name].get_short_help_str(80) for group in (listed, loaded)]  # type: ignore[attr-defined]
        assert lines[0] == lines[1] != "", name
