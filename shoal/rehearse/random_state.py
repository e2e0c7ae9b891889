"""The global random generators of each virtual worker, which share those of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.replica.host_streams import host_streams
from shoal.replica.microbatch_context import get_generators, set_generators

_CPU = torch.device("cpu")


class RandomState:
    """Of one worker, while another one runs."""

    def __init__(self) -> None:
        self._torch: list[Tensor] | None = None
        self._host: Any = None

    def save(self) -> None:
        self._torch = get_generators(_CPU)
        self._host = host_streams.save()

    def load(self) -> None:
        """As they were when this worker ran last; a worker that has not begun takes them over."""
        if self._torch is not None:
            set_generators(_CPU, self._torch)
            host_streams.restore(self._host)
