"""`import torch` loads the entry point "torch.backends" of an installed Shoal: it never fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDING = {
    "another project": "",
    "broken": "raise RuntimeError('half an update')",
    "a script": "import sys; sys.exit('usage: shoal FILE')",
    "no package": None,
}
PROGRAM = """
import sys, warnings
from pathlib import Path

def load(folder):
    for name in [n for n in sys.modules if n.split(".")[0] == "shoal"]:
        del sys.modules[name]
    sys.path[0] = folder
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        torch._import_device_backends()
    said = {str(w.message) for w in caught if "shoal" in str(w.message)}
    registered = hasattr(torch.distributed.Backend, "SHOAL")
    print(Path(folder).name, registered, *said, sep=" | ")

def load_with_warnings_as_errors(folder):
    import torch
    sys.path[0] = folder
    warnings.simplefilter("error")
    torch._import_device_backends()

load_with_warnings_as_errors(sys.argv[2])
for folder in sys.argv[1:]:
    load(folder)
"""


def installed(folder: Path) -> dict[str, str]:
    """The environment of a program that sees Shoal's metadata, and its files, as installed ones."""
    (folder / "site").mkdir()
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(folder / "site"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def hide(folder: Path, content: str | None) -> Path:
    """A working directory in which `import shoal` finds something else."""
    folder.mkdir()
    if content is None:
        (folder / "shoal.py").write_text("")
    else:
        (folder / "shoal").mkdir()
        (folder / "shoal" / "__init__.py").write_text(content)
    return folder


@pytest.mark.whole
def test_torch_is_imported_where_another_shoal_hides_the_package(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    folders = [str(hide(tmp_path / name, content)) for name, content in HIDING.items()]
    (tmp_path / "nothing").mkdir()
    environ = installed(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *folders, str(tmp_path / "nothing")],
        cwd=tmp_path / "broken",
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = {line.split(" | ")[0]: line for line in done.stdout.splitlines()}
    for name in HIDING:
        # an editable install finds the modules of the package beside another package of its name
        is_there = lines[name] == f"{name} | True"
        assert is_there or 'torch.distributed has no backend "shoal"' in lines[name]
    assert lines["nothing"] == "nothing | True"
    if "no backend" in lines["another project"]:
        assert f"in {tmp_path}/another project/shoal" in lines["another project"]
    assert "half an update" in lines["broken"]
    said = 'shoal: torch.distributed has no backend "shoal"'  # with warnings as errors: printed
    assert said in done.stderr
