"""Charts of characters: the expected picture is written out."""

from __future__ import annotations

from shoal.runtime.chart import Axis, line_chart, text_chart

WORKERS = Axis("workers", "{:,.0f}".format, is_log=True)
SPEED_UP = Axis("speed-up", "{:g}".format, is_log=True, base=2.0)
LINES = {"ddp": [(1, 1.0), (2, 2.0)], "~ddp": [(4, 1.0)], "~ideal": [(1, 1.0), (4, 4.0)]}
DRAWN = """
   speed-up
4 │                                                        ···
  │                                                    ····
  │                                                ····
  │                                            ····
  │                                        ····
  │                                    ····
  │                                ····
2 │                           ··●··
  │                       ····
  │                   ····
  │               ····
  │           ····
  │       ····
  │   ····
1 │●··                                                       ○
  └──────────────────────────────────────────────────────────
   1                            2                            4 workers
   ● ddp   ○ ddp, predicted   · ideal
"""


def test_a_chart_in_the_terminal() -> None:
    assert text_chart(WORKERS, SPEED_UP, LINES) == DRAWN.strip("\n").splitlines()


def test_a_prediction_has_the_colour_of_what_was_measured() -> None:
    drawn = line_chart("speed-up", WORKERS, SPEED_UP, LINES)
    assert drawn.count('fill="#0072b2"') == 3
    assert drawn.count('fill="#e69f00"') == 2
    assert "ddp, predicted" in drawn
