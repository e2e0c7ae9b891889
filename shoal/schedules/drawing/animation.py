"""The timing of an animated picture: SMIL attributes over one endless loop.

| start | round 1: wait, move, settle | round 2 … | end |
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.runtime import svg

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
        return self._opacity(changes)

    def journey(self, number: int, start: tuple[float, float], end: tuple[float, float]) -> str:
        """Moves from `start` to `end` in the middle of a round, and is visible only then."""
        begin = START_S + number * ROUND_S
        leave = begin + _LEAVE * ROUND_S
        arrive = begin + _ARRIVE * ROUND_S
        here, there = (f"{x:.1f} {y:.1f}" for x, y in (start, end))
        move = self._animate(
            "animateTransform",
            [(0, here), (leave, here), (arrive, there), (self.length_s, there)],
            attributeName="transform",
            type="translate",
            calcMode="spline",
            keySplines="0 0 1 1;.4 0 .3 1;0 0 1 1",
        )
        return move + self._visible(begin + 0.05 * ROUND_S, arrive)

    def progress(self, x: float, y: float, width: float) -> str:
        """A bar that grows through the loop, with a mark at the beginning of every round."""
        begins = [(START_S + i * ROUND_S) / self.length_s for i in range(self.rounds + 1)]
        grow = self._animate(
            "animate", [(0, "0"), (self.length_s, f"{width:.0f}")], attributeName="width"
        )
        return "".join(
            [
                svg.box((x, y), (width, 5), fill="#e3e8ed"),
                svg.box((x, y), (0, 5), None, grow, fill="#7b8794"),
                *(svg.box((x + width * at, y), (2, 5), fill="#fbfcfd") for at in begins),
            ]
        )

    def _visible(self, begin: float, end: float) -> str:
        changes = [(0.0, False)] if begin > 0 else []
        changes.append((begin, True))
        if end < self.length_s:
            changes.append((end, False))
        return self._opacity(changes)

    def _opacity(self, changes: list[tuple[float, bool]]) -> str:
        frames = [(second, "1" if lit else "0") for second, lit in changes]
        return self._animate("animate", frames, attributeName="opacity", calcMode="discrete")

    def _animate(self, name: str, frames: list[tuple[float, str]], **attributes: str) -> str:
        """Values by seconds of the loop."""
        keys = [f"{second / self.length_s:.5f}" for second, _ in frames]
        return svg.element(
            name,
            **attributes,
            values=";".join(value for _, value in frames),
            keyTimes=";".join(key.rstrip("0").rstrip(".") or "0" for key in keys),
            dur=f"{self.length_s:g}s",
            repeatCount="indefinite",
        )
