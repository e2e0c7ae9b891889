"""A mistake that a script does not catch is one sentence."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shoal.errors import BadInput
from shoal.launch.losses.failures import end_with_sentence


@pytest.mark.parametrize("has_group", [False, True])
def test_the_sentence_is_printed_also_around_a_process_group_of_torch(
    has_group: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch has a hook around ours then, which forgets what was written before an exit."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    end_with_sentence()
    if has_group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(BadInput, BadInput("no key"), None)
    assert ended.value.code == 2
    assert capfd.readouterr().err == "shoal: no key\n"
