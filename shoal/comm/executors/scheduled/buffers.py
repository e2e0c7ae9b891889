"""Where the slots of a collective lie in a rank's tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.schedules.collectives.collective import Collective


class Memory:
    """Slots as flat views. Slots that belong to no tensor of the caller are made when needed.

    Every unit has `unit_numel` elements and is cut as evenly as it goes: part i of k begins at
    element i * n // k.
    """

    def __init__(self, collective: Collective, unit_numel: int, like: Tensor):
        self._chunks = collective.chunks
        self._per_unit = collective.chunks_per_unit
        self._unit_numel = unit_numel
        self._like = like
        self._bound: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def bind(self, unit: int, flat: Tensor) -> None:
        """Unit `unit` lies in `flat`: its chunks are views of it."""
        for part in range(self._per_unit):
            first, last = self._bounds(part)
            self._bound[unit * self._per_unit + part] = flat[first:last]

    def slot(self, slot: int) -> Tensor:
        view = self._bound.get(slot)
        if view is None:
            view = self._made.get(slot)
        if view is None:
            first, last = self._bounds(slot % self._chunks % self._per_unit)
            view = self._made[slot] = self._like.new_empty(last - first)
        return view

    def part(self, slot: int, segment: int, segments: int) -> Tensor:
        whole = self.slot(slot)
        if segments == 1:
            return whole
        numel = whole.numel()
        return whole[segment * numel // segments : (segment + 1) * numel // segments]

    def parts(self, slots: list[int], segment: int, segments: int) -> Tensor:
        """The parts of several slots as one flat tensor: a view if they lie side by side."""
        pieces = [self.part(slot, segment, segments) for slot in slots]
        if len(pieces) == 1:
            return pieces[0]
        return _joined(pieces)

    def forget(self, slots: list[int]) -> None:
        """Give back the room of slots that were made here and are not needed any more."""
        for slot in slots:
            self._made.pop(slot, None)

    def _bounds(self, part: int) -> tuple[int, int]:
        numel = self._unit_numel
        count = self._per_unit
        return part * numel // count, (part + 1) * numel // count


def _joined(pieces: list[Tensor]) -> Tensor:
    pieces = [piece for piece in pieces if piece.numel()] or pieces[:1]
    first = pieces[0]
    total = sum(piece.numel() for piece in pieces)
    expected = first.data_ptr()
    for piece in pieces:
        if piece.data_ptr() != expected or not _same_storage(piece, first):
            return torch.cat(pieces)
        expected += piece.numel() * piece.element_size()
    return first.as_strided((total,), (1,))


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
