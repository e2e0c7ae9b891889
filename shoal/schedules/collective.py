"""The former place of `Collective` and `Transfer`, for schedules that users wrote."""

from __future__ import annotations

import warnings

from shoal.schedules.collectives.collective import Collective, Transfer

__all__ = ["Collective", "Transfer"]

warnings.warn(
    "shoal.schedules.collective has moved: write "
    "'from shoal.schedules.collectives.collective import Collective, Transfer'",
    DeprecationWarning,
    stacklevel=2,
)
