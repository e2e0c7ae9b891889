"""The native part, which rows of embeddings need; all else works where there was no compiler."""

from __future__ import annotations

from shoal.comm.transport.shm.segment import NOT_BUILT, is_built
from shoal.errors import BadInput

try:
    from shoal.comm.transport.shm import _shm
    from shoal.server.embedding import _rows
except ImportError:
    _rows = _shm = None  # type: ignore[assignment]
rows = _rows
memory = _shm


def require_native(table: str) -> None:
    """BadInput where it is not there; asked when a table is made."""
    if rows is None or not is_built():
        raise BadInput(f"{table} needs the native part of Shoal: {NOT_BUILT}")
