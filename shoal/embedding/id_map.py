"""Where ids are in a set of ids: one look-up per id in small tables, else a binary search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.embedding.hashing import Ids

MAX_DIRECT_ROWS = 1 << 20  # of a table, for which an array has an entry for every row


class IdMap:
    """Positions of ids, which ascend, among each other. A look-up allocates nothing per row."""

    def __init__(self, ids: Ids, num_rows: int):
        self.ids = ids
        self.direct: NDArray[np.int32] | None = None  # -1 for rows that are not in the set
        if num_rows <= MAX_DIRECT_ROWS and len(ids):
            self.direct = np.full(num_rows, -1, np.int32)
            self.direct[ids] = np.arange(len(ids), dtype=np.int32)

    def find(self, ids: Ids) -> Ids:
        """Positions of ids of the table; -1 for those that are not in the set."""
        if not len(self.ids):
            return np.full(len(ids), -1)
        if self.direct is not None:
            return self.direct.take(ids).astype(np.int64)
        places = self.ids.searchsorted(ids)
        np.minimum(places, len(self.ids) - 1, out=places)
        places[self.ids[places] != ids] = -1
        return places
