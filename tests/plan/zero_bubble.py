"""Measured times and bubble rates of pipeline schedules, as printed.

Penghui Qi, Xinyi Wan, Guangxing Huang, Min Lin, "Zero Bubble Pipeline Parallelism" (ICLR 2024),
tables 5 and 9. Times in ms of one micro-batch in one stage.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    model: str
    stages: int
    microbatches: int
    forward: float
    backward: float
    weight: float
    transfer: float
    bubbles: dict[str, str]


def _row(
    model: str, p: int, m: int, f: float, b: float, w: float, transfer: float, bubbles: str
) -> Row:
    names = ("1f1b", "zb-h1", "zb-h2")
    return Row(model, p, m, f, b, w, transfer, dict(zip(names, bubbles.split(), strict=True)))


ROWS = [
    _row("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, bubbles="0.2431 0.1585 0.1083"),
    _row("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, bubbles="0.1985 0.1242 0.0837"),
    _row("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, bubbles="0.1240 0.0674 0.0444"),
    _row("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, bubbles="0.2347 0.1323 0.0698"),
    _row("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, bubbles="0.1898 0.1045 0.0559"),
    _row("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, bubbles="0.1091 0.0554 0.0294"),
    _row("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, bubbles="0.2552 0.1397 0.0672"),
    _row("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, bubbles="0.2082 0.1088 0.0516"),
    _row("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, bubbles="0.1251 0.0576 0.0266"),
    _row("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, bubbles="0.2646 0.1421 0.0641"),
    _row("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, bubbles="0.2168 0.1106 0.0490"),
    _row("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, bubbles="0.1352 0.0594 0.0257"),
]  # fmt: skip
