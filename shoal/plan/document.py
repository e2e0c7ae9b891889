"""Writes docs/algorithms.md from the schedules themselves: `python -m shoal.plan.document`."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

from shoal.plan.price import Price, price
from shoal.schedules.catalog import CATALOG, Algorithm, build

PATH = Path("docs/algorithms.md")
RANKS = (4, 7, 8, 16)
_HEAD = """# Collective algorithms

This file is generated from the schedules: `python -m shoal.plan.document`.

V is the size of a rank's whole vector. *Rounds* are those in which something is sent.
*Busiest port* is what the busiest rank carries, in V: per round the larger of what it sends and
what it receives. *Total* is what all ranks send together, in V. *Extra memory* is room beyond
input and output, in V, on the rank that needs the most. The time model is described in
`shoal/schedules/cost.py`.
"""


def document() -> str:
    parts = [_HEAD]
    for kind, family in CATALOG.items():
        parts.append(f"\n## {kind}\n")
        parts += [_section(entry) for entry in family.values()]
    return "".join(parts)


def _section(entry: Algorithm) -> str:
    text = f"\n### {entry.kind}: {entry.name}\n\n{_prose(entry.description)}\n"
    text += "| ranks | rounds | busiest port | total | extra memory |\n|---|---|---|---|---|\n"
    for ranks in RANKS:
        one = price(build(entry.kind, entry.name, ranks), 1, 0.0, 1.0)
        text += f"| {ranks} | {one.rounds} | {' | '.join(_in_v(one))} |\n"
    return text


def _prose(description: str) -> str:
    """The docstring, with its pictures as code blocks."""
    blocks = []
    lines = [line.removeprefix("    ") for line in description.splitlines()]
    for block in "\n".join(lines).split("\n\n"):
        picture = block.startswith("    ")
        blocks.append(f"```\n{block}\n```\n" if picture else f"{block}\n")
    return "\n".join(blocks)


def _in_v(one: Price) -> list[str]:
    amounts = (one.busiest_bytes, one.sent_total_bytes, one.extra_memory_bytes)
    return [str(Fraction(amount).limit_denominator(10_000)) for amount in amounts]


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
    sys.stdout.write(f"{PATH} is written\n")
