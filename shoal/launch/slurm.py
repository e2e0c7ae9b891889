"""Slurm's compressed lists: "4(x2),3" for tasks per node, "node[01-03,07],gpu5" for hosts."""

from __future__ import annotations

import re

from shoal.errors import BadInput

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_BRACKETS = re.compile(r"\[(\w+)[^\]]*\]")
_HOST = re.compile(r"[\w.-]+")
_PORTS = range(20000, 60000)


def tasks_on_node(name: str, counts: str, node: int) -> int:
    """How many tasks the node with this index has; `name` is the variable, for the error.

    >>> [tasks_on_node("", "4(x2),3", node) for node in range(3)]
    [4, 4, 3]
    """
    matches = [_COUNT.fullmatch(item) for item in counts.split(",")]
    remaining = node
    for match in matches:
        if match is None:
            raise BadInput(f"{name} is {counts!r}, which is not a list such as 4(x2),3")
        remaining -= int(match[2] or 1)
        if remaining < 0:
            return int(match[1])
    raise BadInput(f"{name} is {counts!r}, which has no node with the index SLURM_NODEID={node}")


def first_host(name: str, hosts: str) -> str:
    """The first host of a list; `name` is the variable, for the error.

    >>> first_host("", "node[01-03,07],gpu5")
    'node01'
    """
    first = _BRACKETS.sub(r"\1", hosts).split(",")[0]
    if not _HOST.fullmatch(first):
        raise BadInput(
            f"{name} is {hosts!r}, which is not a list of hosts such as node[01-03],gpu5"
        )
    return first


def rendezvous_port(job: int, step: int) -> int:
    """A port that all tasks of a step compute; the factor 1009 separates neighbouring jobs."""
    return _PORTS[(job * 1009 + step) % len(_PORTS)]
