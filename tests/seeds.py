"""Random numbers in tests where ranks are threads, which share torch's generator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOCK = threading.RLock()
_own = threading.local()  # `is_rank`: other ranks draw, too; `is_alone`: not at present
_seed_torch = torch.manual_seed


def begin_rank(size: int) -> None:
    """This thread is a rank of a world of `size`."""
    _own.is_rank = size > 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is drawn inside of it, or in a function with this decorator, follows from `seed`."""
    with _LOCK:
        before = getattr(_own, "is_alone", False)
        _own.is_alone = True
        try:
            _seed_torch(seed)
            yield
        finally:
            _own.is_alone = before


def manual_seed(seed: int) -> torch.Generator:
    """That of torch, for a thread that no other one draws beside."""
    assert getattr(_own, "is_alone", False) or not getattr(_own, "is_rank", False), (
        "ranks that are threads share torch's generator: use tests.seeds.seeded, or a "
        "torch.Generator"
    )
    return _seed_torch(seed)


class ThreadGenerator:
    """In the place of `torch.default_generator`: one generator for each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def here(self) -> torch.Generator:
        if not hasattr(self._local, "generator"):
            self._local.generator = torch.Generator()
        found: torch.Generator = self._local.generator
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here(), name)
