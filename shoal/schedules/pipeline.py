"""The former place of `Action` and `Kind`, for schedules that users wrote."""

from __future__ import annotations

import warnings

from shoal.schedules.pipelines.actions import Action
from shoal.schedules.pipelines.actions import ActionKind as Kind

__all__ = ["Action", "Kind"]

warnings.warn(
    "shoal.schedules.pipeline has moved: write "
    "'from shoal.schedules.pipelines.actions import Action, ActionKind'",
    DeprecationWarning,
    stacklevel=2,
)
