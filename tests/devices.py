"""Tests run on CPUs. Those marked `gpu` start processes that see the GPUs of this machine."""

from __future__ import annotations

import os

import torch

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ALL = "all"
# processes of xdist inherit an environment in which the GPUs are hidden already
_shown = os.environ.setdefault("SHOAL_TEST_GPUS", os.environ.get(_VISIBLE, _ALL))


def show_gpus(are_visible: bool) -> None:
    """To the processes that are started from now on."""
    if are_visible and _shown == _ALL:
        os.environ.pop(_VISIBLE, None)
    else:
        os.environ[_VISIBLE] = _shown if are_visible else ""


show_gpus(True)
NUM_GPUS = torch.cuda.device_count()  # makes no CUDA context, which forks could not have
show_gpus(False)
