"""Where the slots of a collective lie in the tensors of a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.staging import share_storage
from shoal.schedules.collectives.collective import Collective


class SlotBuffers:
    """Slots as flat views. Slots that belong to no tensor of the caller are made when needed.

    Every unit has `unit_numel` elements and is divided as evenly as possible: chunk i of k begins
    at element i * n // k.
    """

    def __init__(self, collective: Collective, unit_numel: int, like: Tensor):
        self._chunks = collective.chunks
        self._per_unit = collective.chunks_per_unit
        self._unit_numel = unit_numel
        self._like = like
        self._bound: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    def bind(self, unit: int, flat: Tensor) -> None:
        """Unit `unit` lies in `flat`: its chunks are views of it."""
        for chunk in range(self._per_unit):
            first, last = self._bounds(chunk)
            self._bound[unit * self._per_unit + chunk] = flat[first:last]

    def slot(self, slot: int) -> Tensor:
        view = self._bound.get(slot)
        if view is None:
            view = self._made.get(slot)
        if view is None:
            first, last = self._bounds(slot % self._chunks % self._per_unit)
            view = self._like.new_empty(last - first)
            self._made[slot] = view
        return view

    def segment(self, slot: int, index: int, segments: int) -> Tensor:
        """One of the segments into which a slot is divided."""
        view = self.slot(slot)
        if segments == 1:
            return view
        numel = view.numel()
        return view[index * numel // segments : (index + 1) * numel // segments]

    def joined(self, slots: list[int], index: int, segments: int) -> Tensor:
        """That segment of several slots as one flat tensor: a view if they are adjacent."""
        views = [self.segment(slot, index, segments) for slot in slots]
        if len(views) == 1:
            return views[0]
        return _joined(views)

    def release(self, slots: list[int]) -> None:
        """Free the memory of slots that were made here and are not needed any more."""
        for slot in slots:
            self._made.pop(slot, None)

    def _bounds(self, chunk: int) -> tuple[int, int]:
        numel = self._unit_numel
        count = self._per_unit
        return chunk * numel // count, (chunk + 1) * numel // count


def _joined(views: list[Tensor]) -> Tensor:
    views = [view for view in views if view.numel()] or views[:1]
    first = views[0]
    total = sum(view.numel() for view in views)
    expected = first.data_ptr()
    for view in views:
        if view.data_ptr() != expected or not share_storage(view, first):
            return torch.cat(views)
        expected += view.numel() * view.element_size()
    return first.as_strided((total,), (1,))
