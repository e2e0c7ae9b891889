"""Loss scaling for precision="fp16" where several workers share a model.

An overflow that one worker finds in its gradients skips the step on all of them, and all of them
lower the scale: it costs one number per group and step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.group import Group, Op


class SharedGradScaler(torch.amp.GradScaler):
    """A GradScaler whose workers agree; `groups` are those whose gradients differ."""

    def __init__(self, device: torch.device, groups: Sequence[Group]):
        super().__init__(device.type)
        self._workers_device = device
        self._groups = [group for group in groups if group.size > 1]

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scale is None:  # a stage of a pipeline that has no loss
            self._lazy_init_scale_growth_tracker(self._workers_device)
        super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        found = torch.zeros((), device=self._workers_device)
        for value in state["found_inf_per_device"].values():
            found = found + value.to(found.device).view(())
        for group in self._groups:
            group.all_reduce(found, Op.MAX).wait()
        state["found_inf_per_device"] = {found.device: found}
