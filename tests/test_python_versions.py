"""Shoal runs on every Python that pyproject.toml promises; what a newer one alone has is not used.

Here the sources are read, and what needs no torch is imported by the interpreters that are found;
`make test PYTHON=python3.12` runs all tests on another one.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import OLDEST, ROOT, answers, question

# modules, and names of modules, that Python 3.11 does not have or that it treats differently
NEWER_MODULES = {"compression", "annotationlib", "concurrent.interpreters"}
NEWER_NAMES = {
    "builtins": {"PythonFinalizationError"},
    "collections.abc": {"Buffer"},
    "copy": {"replace"},
    "dataclasses": {"KW_ONLY"},  # typing.get_type_hints refuses a class that has one
    "enum": {"EnumDict"},
    "inspect": {"markcoroutinefunction"},
    "itertools": {"batched"},
    "math": {"fma", "sumprod"},
    "os": {"process_cpu_count", "listdrives", "unshare", "setns", "pidfd_setns"},
    "pathlib": {"UnsupportedOperation"},
    "queue": {"ShutDown"},
    "random": {"binomialvariate"},
    "sys": {"monitoring", "_is_gil_enabled"},
    "threading": {"setprofile_all_threads", "settrace_all_threads"},
    "typing": {
        "TypeAliasType", "get_protocol_members", "is_protocol", "override", "NoDefault", "ReadOnly",
        "TypeIs",
    },
}  # fmt: skip
NEWER_METHODS = {"full_match"}


@question
def newer_names(path: Path, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in NEWER_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module in NEWER_MODULES:
                yield node.module
            newer = NEWER_NAMES.get(node.module, set())
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name in newer)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in NEWER_NAMES.get(owner, set()) | NEWER_METHODS:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in NEWER_NAMES["builtins"]:
            yield node.id


def test_the_oldest_promised_python_is_the_one_that_is_tested_here() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'requires-python = ">=(\d+)\.(\d+)"', text) == [("3", "11")]


@pytest.mark.parametrize("folder", ["shoal", "tests"])
def test_sources_use_nothing_that_python_3_11_does_not_have(folder: str) -> None:
    found = [
        f"{path}: {name}" for path, names in answers(newer_names, folder).items() for name in names
    ]
    assert not [line for line in found if "test_python_versions" not in line]


@pytest.mark.parametrize("name", ["setup.py", "_shoal_torch_backend.py"])
def test_nor_do_those_beside_them(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(), feature_version=OLDEST)
    assert not list(newer_names(ROOT / name, list(ast.walk(tree))))


# ------------------------------------------------------------------ other interpreters

WITHOUT_PACKAGES = """
import sys
root = sys.argv[1]
sys.path[0] = root
sys.dont_write_bytecode = True
from importlib import import_module
from pathlib import Path

for path in sorted(Path(root, "shoal").rglob("*.py")):
    compile(path.read_text(), str(path), "exec")
for folder in ("strategy", "runtime", "schedules/pipelines", "protocol"):
    for path in sorted(Path(root, "shoal", folder).glob("*.py")):
        try:
            import_module(".".join(path.relative_to(root).with_suffix("").parts))
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "numpy", "networkx", "msgspec"):
                raise
import shoal
print(shoal.parse("ps(quorum=0.9) + tp(2) + pp(2, microbatches=4)"))
"""


def interpreters() -> list[str]:
    """Other Pythons that are installed here and promised."""
    found = []
    for minor in range(OLDEST[1], 20):
        command = shutil.which(f"python3.{minor}")
        if command is not None and minor != sys.version_info.minor:
            starts = subprocess.run([command, "-c", ""], capture_output=True).returncode == 0
            found += [command] if starts else []
    return found


def test_other_pythons_import_what_needs_no_torch_and_read_a_strategy() -> None:
    commands = interpreters()
    if not commands:
        pytest.skip("no other Python that is promised is installed here")
    for command in commands:
        done = subprocess.run(
            [command, "-I", "-c", WITHOUT_PACKAGES, str(ROOT)], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip() == "ps(quorum=0.9) + tp(2) + pp(2, microbatches=4)"
