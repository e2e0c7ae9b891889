"""The timing of an animated picture: SMIL attributes over one endless loop.

| start | round 1: wait, move, settle | round 2 … | end |
"""

from __future__ import annotations

from dataclasses import dataclass

START_S = 3.0
ROUND_S = 3.0
END_S = 5.0
_LEAVE = 0.2
_ARRIVE = 0.75  # of a round


@dataclass(frozen=True)
class Animation:
    """The loop of a schedule with so many rounds."""

    rounds: int

    @property
    def length_s(self) -> float:
        return START_S + self.rounds * ROUND_S + END_S

    def during(self, number: int) -> str:
        """Visible in one section only: 0 is the start, 1 the first round, rounds + 1 the end."""
        begin = 0.0 if number == 0 else START_S + (number - 1) * ROUND_S
        end = self.length_s if number == self.rounds + 1 else START_S + number * ROUND_S
        return self._visible(begin, end)

    def states(self, shown: list[bool]) -> str | None:
        """Lit or not: at the start, and after the arrival in each round. None if constant."""
        changes = [(0.0, shown[0])]
        for number, lit in enumerate(shown[1:]):
            if lit != changes[-1][1]:
                changes.append((START_S + (number + _ARRIVE) * ROUND_S, lit))
        if len(changes) == 1:
            return None
        times = ";".join(self._key(second) for second, _ in changes)
        values = ";".join("1" if lit else "0" for _, lit in changes)
        kind = 'attributeName="opacity" calcMode="discrete"'
        return self._animate("animate", kind, values, times)

    def journey(self, number: int, start: tuple[float, float], end: tuple[float, float]) -> str:
        """Moves from `start` to `end` in the middle of a round, and is visible only then."""
        begin = START_S + number * ROUND_S
        leave = begin + _LEAVE * ROUND_S
        arrive = begin + _ARRIVE * ROUND_S
        times = ";".join(self._key(s) for s in (0, leave, arrive, self.length_s))
        (x0, y0) = start
        (x1, y1) = end
        here = f"{x0:.1f} {y0:.1f}"
        there = f"{x1:.1f} {y1:.1f}"
        ease = 'keySplines="0 0 1 1;.4 0 .3 1;0 0 1 1"'
        move = self._animate(
            "animateTransform",
            f'attributeName="transform" type="translate" calcMode="spline" {ease}',
            f"{here};{here};{there};{there}",
            times,
        )
        return move + self._visible(begin + 0.05 * ROUND_S, arrive)

    def progress(self, x: float, y: float, width: float) -> str:
        """A bar that grows through the loop, with a mark at the beginning of every round."""
        begins = [(START_S + i * ROUND_S) / self.length_s for i in range(self.rounds + 1)]
        marks = "".join(
            f'<rect x="{x + width * begin:.1f}" y="{y}" width="2" height="5" fill="#fbfcfd"/>'
            for begin in begins
        )
        grow = self._animate("animate", 'attributeName="width"', f"0;{width:.0f}", "0;1")
        return (
            f'<rect x="{x}" y="{y}" width="{width:.0f}" height="5" fill="#e3e8ed"/>'
            f'<rect x="{x}" y="{y}" width="0" height="5" fill="#7b8794">{grow}</rect>{marks}'
        )

    def _visible(self, begin: float, end: float) -> str:
        times = ["0"]
        values = ["1" if begin == 0 else "0"]
        if begin > 0:
            times = [*times, self._key(begin)]
            values = [*values, "1"]
        if end < self.length_s:
            times = [*times, self._key(end)]
            values = [*values, "0"]
        kind = 'attributeName="opacity" calcMode="discrete"'
        return self._animate("animate", kind, ";".join(values), ";".join(times))

    def _key(self, second: float) -> str:
        return f"{second / self.length_s:.5f}".rstrip("0").rstrip(".") or "0"

    def _animate(self, element: str, attributes: str, values: str, times: str) -> str:
        return (
            f'<{element} {attributes} values="{values}" keyTimes="{times}" '
            f'dur="{self.length_s:g}s" repeatCount="indefinite"/>'
        )
