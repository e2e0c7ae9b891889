"""The native part, which rows of embeddings need; all else works where there was no compiler."""

from __future__ import annotations

from shoal.errors import BadInput
from shoal.transport.shm.segment import NOT_BUILT, is_built

try:
    from shoal.embedding import _rows
    from shoal.transport.shm import _shm
except ImportError:
    _rows = _shm = None  # type: ignore[assignment]
rows = _rows
memory = _shm


def require_native(table: str) -> None:
    """BadInput where it is not there; asked when a table is made."""
    if rows is None or not is_built():
        raise BadInput(f"{table} needs the native part of Shoal: {NOT_BUILT}")
