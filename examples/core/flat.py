"""A model as two vectors: its values and its gradients, cut into buckets.

What is exchanged is a slice of a vector, whatever layers it holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class FlatModel:
    """Parameters are views of `values`, their gradients views of `gradients`.

    The last layer comes first, since its gradients are the first that backward finishes.
    For real: shoal/replica/flat_params.py and shoal/replica/grad_buckets.py.
    """

    def __init__(self, model: nn.Module, bucket_elements: int) -> None:
        self.model = model
        self.parameters = list(model.parameters())[::-1]
        self.values = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        self.gradients = torch.zeros_like(self.values)
        self.buckets: list[slice] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._members: list[int] = []  # parameters of each bucket
        self._missing: list[int] = []  # of them, those whose gradient has not come in this step
        self._lay_out(bucket_elements)

    def _lay_out(self, bucket_elements: int) -> None:
        begin = 0
        bucket_begin = 0
        members = 0
        for parameter in self.parameters:
            end = begin + parameter.numel()
            parameter.data = self.values[begin:end].view_as(parameter)
            parameter.grad = self.gradients[begin:end].view_as(parameter)
            self._bucket_of[parameter] = len(self.buckets)
            members += 1
            if end - bucket_begin >= bucket_elements or end == self.values.numel():
                self.buckets.append(slice(bucket_begin, end))
                self._members.append(members)
                bucket_begin = end
                members = 0
            begin = end

    def watch(self, on_bucket: Callable[[slice], None]) -> None:
        """Call `on_bucket` in backward, as soon as all gradients of a bucket are there."""

        def arrived(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            index = self._bucket_of[parameter]
            self._missing[index] -= 1
            if self._missing[index] == 0:
                on_bucket(self.buckets[index])

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(arrived)

    def begin_step(self) -> None:
        self.gradients.zero_()
        self._missing = list(self._members)
