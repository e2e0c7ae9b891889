"""What each room of the package may hold: a change that passes a limit of `budget.toml` fails.

A room is a folder of `shoal/`, or a file beside them. `python -m tests.test_budget` prints the
table as it is now.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from tests.sources import ROOT, SHOAL, answers, question

LONGEST_FUNCTION = 60  # of a room that budget.toml does not give more
# not size: what says nothing, and what Python adds by itself
_NO_SIZE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
COLUMNS = {
    "tokens": "tokens of Python, without comments and docstrings",
    "names": "names that other rooms import from it",
    "entered": "files that other rooms import: its face, which is at most six in the end",
    "lines": "lines of its longest function",
    "wide": "functions with 8 or more parameters",
    "parallel": "assignments of several values in one line, as in a, b = c, d",
    "starred": "calls that unpack a local, as in f(*these)",
}
Room = dict[str, int]


@question
def size_of_file(path: Path, nodes: list[ast.AST]) -> Iterator[str]:
    """Its tokens, parallel assignments and calls that unpack; then one text a function."""
    parallel = sum(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
        for node in nodes
    )
    starred = sum(isinstance(node, ast.Call) and _unpacks_a_local(node) for node in nodes)
    yield f"{_tokens(path.read_text(), nodes)} {parallel} {starred}"
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            own = [each for each in arguments if each.arg not in ("self", "cls")]
            yield f"{node.name} {node.end_lineno - node.lineno + 1} {len(own)}"


def _unpacks_a_local(call: ast.Call) -> bool:
    return any(
        isinstance(argument, ast.Starred)
        and isinstance(argument.value, ast.Name)
        and argument.value.id != "args"
        for argument in call.args
    )


def _tokens(text: str, nodes: list[ast.AST]) -> int:
    docstrings = set(_docstrings(nodes))
    return sum(
        token.type not in _NO_SIZE and token.start not in docstrings
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def _docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, int]]:
    for node in nodes:
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            yield node.body[0].lineno, node.body[0].col_offset


@question
def names_of_other_rooms(path: Path, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "shoal"
        ):
            for alias in node.names:
                if room_of_module(f"{node.module}.{alias.name}") != room_of(path):
                    yield f"{node.module}.{alias.name}"


def room_of(path: Path) -> str:
    """The room of a file; the tests are one, too, as they are asked the same questions."""
    return path.relative_to(SHOAL if path.is_relative_to(SHOAL) else ROOT).parts[0]


def room_of_module(name: str) -> str:
    room = name.split(".")[1]
    if (SHOAL / room).is_dir():
        return room
    return f"{room}.py" if (SHOAL / f"{room}.py").is_file() else "__init__.py"


def rooms() -> dict[str, Room]:
    found: dict[str, Room] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0))
    for path, texts in answers(size_of_file).items():
        room = found[room_of(path)]
        tokens, parallel, starred = map(int, texts[0].split())
        room["tokens"] += tokens
        room["parallel"] += parallel
        room["starred"] += starred
        for text in texts[1:]:
            _, lines, parameters = text.split()
            room["lines"] = max(room["lines"], int(lines))
            room["wide"] += int(parameters) >= 8
    names = set().union(*answers(names_of_other_rooms).values())
    for name in names:
        found[room_of_module(name)]["names"] += 1
    for file in {file_of(name) for name in names if room_of_module(name) != "__init__.py"}:
        found[room_of_module(file)]["entered"] += 1
    return found


def file_of(name: str) -> str:
    """The module that has this name, which may be the module itself."""
    path = ROOT / name.replace(".", "/")
    return name if path.is_dir() or path.with_suffix(".py").is_file() else name.rpartition(".")[0]


def budget() -> dict[str, Room]:
    table = msgspec.toml.decode((ROOT / "budget.toml").read_text(), type=dict[str, Room])
    least = {"lines": LONGEST_FUNCTION}
    return {name: {column: 0 for column in COLUMNS} | least | room for name, room in table.items()}


def over(name: str, room: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """A sentence for each limit that this room passes, with where the most of it is."""
    return [
        f"{name} has {room[column]:,} {what}, {room[column] - limits[column]:,} above "
        f"its limit of {limits[column]:,}. Most of it: {', '.join(_most(name, column))}. "
        f"Take something out, or raise {name}.{column} in budget.toml and say in the commit "
        f"what it buys."
        for column, what in COLUMNS.items()
        if room[column] > limits[column]
    ]


def _most(name: str, column: str) -> list[str]:
    """The places of a room that count most: its folders and files, or its functions."""
    places: Counter[str] = Counter()
    for path, texts in answers(size_of_file).items():
        if room_of(path) != name:
            continue
        inside = path.relative_to(SHOAL / name).parts[0] if (SHOAL / name).is_dir() else name
        sizes = dict(zip(("tokens", "parallel", "starred"), texts[0].split(), strict=True))
        if column in sizes:
            places[inside] += int(sizes[column])
        for function in texts[1:]:
            of, lines, parameters = function.split()
            if column == "lines":
                places[f"{path.name}:{of}"] = int(lines)
            elif column == "wide" and int(parameters) >= 8:
                places[f"{path.name}:{of}"] = int(parameters)
    if column in ("names", "entered"):
        every = set().union(*answers(names_of_other_rooms).values())
        places.update(file_of(each) for each in every if room_of_module(each) == name)
    return [f"{place} {count:,}" for place, count in places.most_common(4)]


def test_every_room_keeps_its_budget() -> None:
    found, limits = rooms(), budget()
    assert found.keys() == limits.keys(), "budget.toml has a line for each room, and no others"
    said = [
        sentence for name in sorted(found) for sentence in over(name, found[name], limits[name])
    ]
    assert not said, "\n".join(said)


def test_a_budget_is_not_far_above_what_is_there() -> None:
    """What has been saved stays saved: a room of 1,000 tokens less than its limit lowers it."""
    found, limits = rooms(), budget()
    spare = {name: limits[name]["tokens"] - found[name]["tokens"] for name in limits}
    assert not {name: more for name, more in spare.items() if more > 1000}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_limit_that_is_passed_is_a_sentence_with_its_places(column: str) -> None:
    room = rooms()["replica"]
    (sentence,) = over("replica", room, room | {column: room[column] - 1})
    assert f"{room[column]:,} {COLUMNS[column]}, 1 above its limit" in sentence
    assert len(_most("replica", column)) == 4 or room[column] < 4


def test_docstrings_and_comments_have_no_size() -> None:
    text = '"""Says it."""\n# why\ndef f(x):\n    """And this."""\n    return x  # so\n'
    assert _tokens(text, list(ast.walk(ast.parse(text)))) == 8  # def f ( x ) : return x


def table() -> Iterator[str]:
    """The lines of budget.toml, as the package is now."""
    for name, room in sorted(rooms().items(), key=lambda item: -item[1]["tokens"]):
        kept = {column: count for column, count in room.items() if count}
        kept["tokens"] = -(-room["tokens"] // 100) * 100
        if room["lines"] <= LONGEST_FUNCTION:
            del kept["lines"]
        key = name if name.isidentifier() else f'"{name}"'
        yield f"{key} = {{ {', '.join(f'{column} = {count}' for column, count in kept.items())} }}"


if __name__ == "__main__":
    from tests import test_budget

    print(*test_budget.table(), sep="\n")
