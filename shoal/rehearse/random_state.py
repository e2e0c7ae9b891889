"""The global random generators of each virtual worker, which share those of one process."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.replica.host_streams import Parked, host_streams


class RandomState:
    """Of one worker, while another one runs."""

    def __init__(self) -> None:
        self._torch: Tensor | None = None
        self._host: Parked = {}

    def save(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._host = host_streams.park(self._host)

    def load(self) -> None:
        """As they were when this worker ran last; a worker that has not begun takes them over."""
        if self._torch is not None:
            torch.default_generator.set_state(self._torch)
            host_streams.resume(self._host)
