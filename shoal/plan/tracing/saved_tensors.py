"""Counts what autograd saves between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class SavedTensors:
    """Knows which memory of saved tensors is new; that of `known` tensors does not count."""

    def __init__(self, known: Iterable[Tensor]):
        self._known = {t.untyped_storage()._cdata for t in known}
        self._seen: dict[int, Any] = {}
        self.total = 0

    def note(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return tensor

    def add(self, tensor: Tensor) -> int:
        """The bytes of its storage, if that was not counted before."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known or storage._cdata in self._seen:
            return 0
        self._seen[storage._cdata] = storage  # kept, so that its number is not given again
        self.total += storage.nbytes()
        return storage.nbytes()
