"""Questions about the source files, asked in one pass: to parse all of them takes seconds.

The answers are kept in the cache of pytest for the other processes of a run, and for the next one.

@question
def classes(path: Path, nodes: list[ast.AST]) -> Iterator[str]: …

answers(classes)        of every file of shoal, by its path
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from shoal.runtime.files import write_atomically

ROOT = Path(__file__).parents[1]
SHOAL = ROOT / "shoal"
OLDEST = (3, 11)  # Python that reads them
Question = Callable[[Path, list[ast.AST]], Iterable[str]]
Answers = dict[str, list[str]]  # of one file, by the name of the question
_ASKED_IN = (
    *("tests.runtime.test_one_home", "tests.strategy.test_terms_describe_themselves"),
    *("tests.test_layers", "tests.test_names", "tests.test_python_versions"),
    "tests.test_budget",
)
_questions: dict[str, Question] = {}


def question(ask: Question) -> Question:
    """`nodes` are all nodes of the tree of a file; the first is the module. Answers are texts."""
    _questions[f"{ask.__module__}.{ask.__name__}"] = ask
    return ask


def answers(ask: Question, folder: str = "shoal") -> dict[Path, list[str]]:
    assert ask.__module__ in _ASKED_IN, "add it, so that it is asked together with the others"
    return {Path(path): found[f"{ask.__module__}.{ask.__name__}"] for path, found in _all(folder)}


@cache
def _all(folder: str) -> list[tuple[str, Answers]]:
    for name in _ASKED_IN:
        import_module(name)
    paths = sorted((ROOT / folder).rglob("*.py"))
    kept = ROOT / ".pytest_cache" / f"sources-{folder}-{_state(paths)}.json"
    found: dict[str, Answers]
    if kept.is_file():
        found = json.loads(kept.read_text())
    else:
        found = {str(path): _read_file(path) for path in paths}
        with suppress(OSError):
            _keep(kept, found, f"sources-{folder}-*")
    return list(found.items())


def _state(paths: Iterable[Path]) -> str:
    """Of these files, and of those that ask."""
    asking = [ROOT / f"{name.replace('.', '/')}.py" for name in _ASKED_IN]
    stats = [(str(path), path.stat()) for path in [*paths, *asking, Path(__file__)]]
    text = repr([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _keep(file: Path, found: dict[str, Answers], older: str) -> None:
    file.parent.mkdir(exist_ok=True)
    for other in file.parent.glob(older):
        other.unlink()
    write_atomically(file, json.dumps(found))


def _read_file(path: Path) -> Answers:
    tree = ast.parse(path.read_text(), str(path), feature_version=OLDEST)
    nodes = list(ast.walk(tree))
    return {name: list(ask(path, nodes)) for name, ask in _questions.items()}
