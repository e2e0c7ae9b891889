"""A copy of a model's structure computes with its own tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.replica.attributes import copy_structure
from shoal.replica.batchnorm import use_global_batchnorm


class NormAndActivation(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(input))


def test_a_batchnorm_with_a_forward_of_its_own_keeps_it_in_the_copy() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), NormAndActivation(4))
    use_global_batchnorm(model, solo_group())
    twin = copy_structure(model)
    x = torch.ones(2, 1, 3, 3)
    expected = twin.eval()(x)
    norm = model[1]
    for name, tensor in norm.named_parameters():
        setattr(norm, name, nn.Parameter(tensor[:2]))
    for name, tensor in norm.named_buffers():
        setattr(norm, name, tensor if tensor.dim() == 0 else tensor[:2])
    torch.testing.assert_close(twin(x), expected)
