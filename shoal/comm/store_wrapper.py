"""A torch store in Python that leads to another one."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.distributed_c10d import Store


class StoreWrapper(Store):
    """As `store`, but for `set`, `get` and `clone`. Keep a reference: torch does not."""

    def __init__(self, store: Store):
        super().__init__()
        self._store = store

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()
