"""A file imports only from layers below its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.sources import SHOAL, answers, question

# From the ground up, folder by folder.
LAYERS = [
    ["errors", "runtime"],
    ["cluster"],
    ["strategy", "schedules"],
    ["plan"],
    ["comm"],
    ["replica"],
    ["server"],
    ["sync"],
    ["launch"],
    ["train"],
    ["observe"],
    ["rehearse"],
    ["worker", "integrations"],
    ["commands", "__main__"],
]
# the planner and the runtime both stand on the schedules and do not know each other
APART = [({"plan", "cluster"}, {"comm", "replica", "server", "sync"})]


def layer_of(module: str) -> int:
    """The layer of `shoal.<module>`; the longest name that fits decides."""
    fits = [
        (len(name), level)
        for level, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    assert fits, f"shoal.{module} has no place in the house: add it to LAYERS"
    return max(fits)[1]


@question
def imports_of(path: Path, nodes: list[ast.AST]) -> set[str]:
    """Modules of shoal that a file imports, anywhere in it, without the leading `shoal.`.

    Imports for type checkers alone are left out where they stay in the top folder of the file.
    """
    for_types = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    here = f"shoal.{module_name(path).split('.')[0]}." if path.is_relative_to(SHOAL) else "tests."
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if id(node) in for_types and node.module.startswith(here):
                continue
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("shoal.") for name in found} & modules()


@cache
def modules() -> frozenset[str]:
    return frozenset(module_name(p) for p in SHOAL.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SHOAL).with_suffix("").parts).removesuffix(".__init__")


@cache
def arrows() -> list[tuple[str, str]]:
    return [
        (module_name(path), target)
        for path, targets in answers(imports_of).items()
        if path != SHOAL / "__init__.py"
        for target in targets
        if target not in (module_name(path), "__init__")
    ]


def is_init_of(package: str, module: str) -> bool:
    return module.startswith(package + ".")


def test_every_arrow_points_down() -> None:
    upward = [
        f"{source} -> {target}"
        for source, target in arrows()
        if layer_of(target) > layer_of(source)
    ]
    assert not upward


def test_there_is_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for source, target in arrows():
        if not is_init_of(target, source):
            graph.setdefault(source, set()).add(target)
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> None:
        assert node not in path, f"import cycle: {' -> '.join([*path, node])}"
        if node not in done:
            for target in graph.get(node, ()):
                visit(target, (*path, node))
            done.add(node)

    for node in graph:
        visit(node, ())


def test_planner_and_runtime_do_not_know_each_other() -> None:
    for left, right in APART:
        crossing = [
            f"{s} -> {t}"
            for s, t in arrows()
            if {s.split(".")[0], t.split(".")[0]} & left
            and {s.split(".")[0], t.split(".")[0]} & right
        ]
        assert not crossing


def test_the_planner_runs_without_torch() -> None:
    hidden = "import sys; sys.modules['torch'] = None\n"
    planner = [
        name
        for name in sorted(modules())
        if name.split(".")[0] in ("plan", "cluster") and not name.startswith("plan.tracing")
    ]
    imports = "\n".join(f"import shoal.{name}" for name in planner)
    subprocess.run([sys.executable, "-c", hidden + imports], check=True)
