"""A float that carries its slopes: what a price computes with it has slopes, too.

Prices are sums, products, quotients and the larger of two, so one evaluation with such numbers
gives the slope of every row's time by every constant. Where a branch is taken, the slope is that of
the branch. What a function outside of these four operations returns is a plain float, without
slopes; a test compares with differences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Slopes = NDArray[np.float64]


class Sloped(float):
    """A value, and its derivative by each of some constants."""

    __slots__ = ("slopes",)
    slopes: Slopes

    def __new__(cls, value: float, slopes: Slopes) -> Sloped:
        made = super().__new__(cls, value)
        made.slopes = slopes
        return made

    def __add__(self, other: float) -> float:
        if isinstance(other, Sloped):
            return Sloped(float.__add__(self, other), self.slopes + other.slopes)
        return Sloped(float.__add__(self, other), self.slopes)

    __radd__ = __add__

    def __sub__(self, other: float) -> float:
        if isinstance(other, Sloped):
            return Sloped(float.__sub__(self, other), self.slopes - other.slopes)
        return Sloped(float.__sub__(self, other), self.slopes)

    def __rsub__(self, other: float) -> float:
        return Sloped(float.__rsub__(self, other), -self.slopes)

    def __mul__(self, other: float) -> float:
        plain = float(other)
        if isinstance(other, Sloped):
            slopes = self.slopes * plain + other.slopes * float(self)
            return Sloped(float.__mul__(self, plain), slopes)
        return Sloped(float.__mul__(self, plain), self.slopes * plain)

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> float:
        plain = float(other)
        quotient = float.__truediv__(self, plain)
        if isinstance(other, Sloped):
            return Sloped(quotient, (self.slopes - other.slopes * quotient) / plain)
        return Sloped(quotient, self.slopes / plain)

    def __rtruediv__(self, other: float) -> float:
        quotient = float.__rtruediv__(self, other)
        return Sloped(quotient, self.slopes * (-quotient / float(self)))

    def __neg__(self) -> float:
        return Sloped(float.__neg__(self), -self.slopes)


def slopes_of(value: float, constants: int) -> Slopes:
    return value.slopes if isinstance(value, Sloped) else np.zeros(constants)
