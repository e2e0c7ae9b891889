"""Tests run on CPUs. Those marked `gpu` start processes that see the GPUs of this machine."""

from __future__ import annotations

import os

import pytest
import torch

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ALL = "all"
# processes of xdist inherit an environment in which the GPUs are hidden already
_shown = os.environ.setdefault("SHOAL_TEST_GPUS", os.environ.get(_VISIBLE, _ALL))


def show_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if _shown == _ALL:
        monkeypatch.delenv(_VISIBLE)
    else:
        monkeypatch.setenv(_VISIBLE, _shown)


def _num_gpus() -> int:
    """Without a CUDA context, which forks could not have."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(_VISIBLE, "")
        show_gpus(monkeypatch)
        return torch.cuda.device_count()


NUM_GPUS = _num_gpus()
os.environ[_VISIBLE] = ""
