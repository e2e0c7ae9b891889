"""Measured calls in a cluster file: what `shoal cluster calibrate` found.

[[measured]]
executor = "shm"
kind = "all_reduce"
ranks = 2
points = [[256, 4.9], [1048576, 180.0]]     # bytes, microseconds
spread = [[4.8, 5.1], [176.0, 190.0]]       # quartiles, in microseconds

[[between]] has the same keys: calls between nodes, one rank of each (`calibrate --on ENGINE`).
"""

from __future__ import annotations

from typing import Any

from shoal.cluster.hardware import MeasuredCalls
from shoal.cluster.toml_block import TomlBlock
from shoal.errors import BadInput


def measured_calls(block: TomlBlock) -> MeasuredCalls:
    executor = block.text("executor")
    kind = block.text("kind")
    algorithm = block.text("algorithm", "")
    ranks = block.count("ranks")
    block.source()
    points = _pairs(block, "points")
    spread = _pairs(block, "spread")
    block.finish()
    if spread and len(spread) != len(points):
        block.refuse("spread", f"{len(points)} pairs are expected, not {len(spread)}")
    if ranks < 2:
        block.refuse("ranks", "calls are between 2 ranks at least")
    try:
        return MeasuredCalls(
            executor,
            kind,
            algorithm,
            ranks,
            tuple((size, us * 1e-6) for size, us in points),
            tuple((low * 1e-6, high * 1e-6) for low, high in spread),
        )
    except BadInput as error:
        block.refuse("points", str(error))


def _pairs(block: TomlBlock, key: str) -> list[tuple[float, float]]:
    value: Any = block.table.get(key, []) if block.has(key) else []
    try:
        return [(float(one), float(other)) for one, other in value]
    except (TypeError, ValueError):
        block.refuse(key, f"pairs of numbers such as [[256, 4.9]] are expected, not {value!r}")
