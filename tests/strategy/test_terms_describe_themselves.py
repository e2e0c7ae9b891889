"""What a term means stands with the term and in its plan; nothing else asks for its type."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest

import shoal
from shoal.strategy.base import Batches, SyncTerm
from shoal.strategy.terms import TERMS
from shoal.sync import SyncPlan, plan_for
from tests.sources import answers, question

CLASSES = {kind.__name__ for kind in TERMS.values()}
SYNC_TERMS = [kind for kind in TERMS.values() if issubclass(kind, SyncTerm)]


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def asked_types(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Terms in isinstance, issubclass, `type(x) is …` and `case …`, with their lines."""
    for node in nodes:
        found: set[str] = set()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("isinstance", "issubclass"):
                found = names_in(node.args[1])
        elif isinstance(node, ast.MatchClass):
            found = names_in(node.cls)
        elif isinstance(node, ast.Compare) and "type" in names_in(node.left):
            found = {name for right in node.comparators for name in names_in(right)}
        if isinstance(node, ast.Call | ast.MatchClass | ast.Compare):
            yield from ((node.lineno, name) for name in found & CLASSES)


def runs(tree: ast.Module) -> set[str]:
    """The terms whose plan a file registers."""
    decorators = [
        d for node in tree.body if isinstance(node, ast.ClassDef) for d in node.decorator_list
    ]
    calls = [d for d in decorators if isinstance(d, ast.Call) and names_in(d.func) == {"runs"}]
    return {name for call in calls for arg in call.args for name in names_in(arg)}


@question
def types_of_others(path: Path, nodes: list[ast.AST]) -> list[str]:
    own = runs(cast("ast.Module", nodes[0]))
    return [f"{path}:{line} {name}" for line, name in asked_types(nodes) if name not in own]


def test_nothing_but_its_own_files_asks_for_the_type_of_a_term() -> None:
    assert not [line for lines in answers(types_of_others).values() for line in lines]


def test_every_term_is_a_public_name() -> None:
    assert set(TERMS) <= set(dir(shoal))
    for name, kind in TERMS.items():
        assert getattr(shoal, name) is kind


@pytest.mark.parametrize("kind", SYNC_TERMS, ids=lambda kind: kind.__name__)
def test_every_sync_term_has_a_plan_in_the_module_that_it_names(kind: type[SyncTerm]) -> None:
    plan = plan_for(kind(), 2)
    assert isinstance(plan, SyncPlan) and type(plan).__module__ == kind.sync_module


TRAITS = {
    "single": "communicates=False",
    "ddp": "",
    'ddp(algorithm="ring")': "collective_algorithm=ring",
    'ddp(compress="int8")': "equals_single=False",
    "zero(3)": "",
    "ps": "has_servers server_processes=1",
    "ps(quorum=0.5)": "has_servers server_processes=1 lockstep=False equals_single=False "
    "survives_loss starts_apart",
    'ps(placement="rank0", staleness=2)': "has_servers lockstep=False equals_single=False "
    "survives_loss starts_apart needs_first_replica",
    "gossip": "lockstep=False equals_single=False",
    'gossip(mode="async")': "lockstep=False equals_single=False survives_loss shares_memory",
    "hogwild": "batches=IN_TURNS lockstep=False equals_single=False survives_loss needs_one_host "
    "needs_cpu shares_memory",
    "mapreduce": "batches=WHOLE_DATASET",
    "localsgd": "lockstep=False equals_single=False",
    "localsgd(every=1)": "",
}
DEFAULTS = {
    "batches": "SPLIT",
    **dict.fromkeys(("lockstep", "equals_single", "communicates"), True),
    **dict.fromkeys(("survives_loss", "starts_apart", "needs_first_replica"), False),
    **dict.fromkeys(("needs_one_host", "needs_cpu", "shares_memory", "has_servers"), False),
    "server_processes": 0,
    "collective_algorithm": None,
}


@pytest.mark.parametrize("text", TRAITS)
def test_traits_that_differ_from_synchronous_data_parallelism(text: str) -> None:
    sync = shoal.parse(text).sync
    assert sync is not None
    found = []
    for trait, default in DEFAULTS.items():
        value = getattr(sync, trait)
        value = value.name if isinstance(value, Batches) else value
        if value != default:
            found.append(trait if value is True else f"{trait}={value}")
    assert sorted(found) == sorted(TRAITS[text].split())
