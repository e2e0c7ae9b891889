"""The rows of one table that are pulled often, as one server sees them.

counts     pulls of rows here, by a space-saving sketch
hot set    the rows over a share of all pulls; a worker has chosen them from the counts of all
           servers, and every server has a copy of each
published  the hot rows that this server owns, and the version at which each has changed last
copies     the hot rows of other servers, and the version that each owner has published
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.server.embedding import native
from shoal.server.embedding.hashing import MAX_DIRECT_ROWS, IdMap, Ids
from shoal.server.embedding.heat import Hottest, IdCounts, SpaceSaving
from shoal.server.embedding.row_copy import Rows, copy_rows
from shoal.server.embedding.spec import TableSpec
from shoal.server.embedding.table import RowTable
from shoal.server.messages import MAX_HOT_ROWS
from shoal.server.protocol import Refused

MIN_COUNTERS = 4096
MAX_COUNTERS = 1 << 17
NO_VERSION = -1
_ANY_VERSION = 2**62  # where no copies are needed
NO_IDS: Ids = np.zeros(0, np.int64)
_COUNTED_AT_ONCE = 1 << 16  # copies of rows
_MOST_DOUBLINGS = 6
_REPORTED = 1024  # at least: a row that is hot in sum may not be among the hottest of one server


def counters_of(spec: TableSpec) -> int:
    """Enough to find every hot row, and the hottest 1% of small tables."""
    wanted = max(2 / spec.hot_share if spec.hot_share else 0, 2 * spec.num_rows / 100)
    return int(min(MAX_COUNTERS, max(MIN_COUNTERS, wanted)))


def max_hot_rows(spec: TableSpec) -> int:
    """Copies take at most 64 MiB on a server."""
    return max(1, min(MAX_HOT_ROWS, (64 << 20) // (4 * spec.dim)))


class RowChanges(NamedTuple):
    """Hot rows of this server that have changed, as of `version`."""

    number: int
    version: int
    ids: Tensor
    rows: Tensor


class FoundCopies(NamedTuple):
    """Positions of rows in the hot set, -1 for others, and which copies are new enough."""

    positions: Ids
    is_fresh: NDArray[np.bool_]

    @property
    def is_settled(self) -> bool:
        """Whether no copy is on its way: all hot rows are there."""
        return bool((self.is_fresh | (self.positions < 0)).all())


class HotTable:
    """Counts, hot set and copies of one table on server `index`; under the model's lock."""

    def __init__(self, table: RowTable):
        self.table = table
        self.spec = table.spec
        self.index = table.shard
        self.number = 0
        self.is_published = False
        self.total = SpaceSaving(counters_of(self.spec))
        self.recent = SpaceSaving(counters_of(self.spec), self.spec.num_rows)
        self.served = 0  # rows, since there are copies
        self._by_owner = np.zeros(table.shards, np.int64)
        self._copies_served = IdCounts(self.spec.num_rows)  # that are not in `_by_owner` yet
        self._own_served = 0  # that are not in `_by_owner` yet
        self.before = 0  # rows that were served before there were copies
        self.has_copies = False  # whether there was a hot set
        self._choices = 0  # since the hot set has changed
        self._asks_at = self._period()
        self._forget()

    def note(self, ids: Ids, copies: int = 0, missing: Ids = NO_IDS) -> None:
        """These rows are served; the first of them are copies, but for those that are missing."""
        self.recent.add(ids)
        if copies and self.has_copies:
            copied = ids[:copies]
            self._copies_served.add(np.delete(copied, missing) if len(missing) else copied)
        self._add_served(len(ids) - len(missing), len(ids) - copies)

    def _add_served(self, served: int, owned: int) -> None:
        if not self.has_copies:
            self.before += served
            return
        self.served += served
        self._own_served += owned
        if not self._copies_served.is_direct and self._copies_served.size >= _COUNTED_AT_ONCE:
            self._count_owners()

    def _count_owners(self) -> NDArray[np.int64]:
        """The rows that were served since there are copies, by their owner."""
        ids, counts = self._copies_served.take()
        owners = self.spec.owner(torch.from_numpy(ids), self.table.shards).numpy()
        np.add.at(self._by_owner, owners, counts)
        self._by_owner[self.index] += self._own_served
        self._own_served = 0
        return self._by_owner

    def asks(self) -> bool:
        """Whether the worker that pulls now should choose the hot set; asks one at a time."""
        if not self.spec.hot_share or self.table.shards == 1 or self.index != 0:
            return False
        if self.recent.total < self._asks_at:
            return False
        self._asks_at = self.recent.total + self._period()
        return True

    def take_counts(self) -> tuple[Hottest, int]:
        """The counts since this was called last."""
        found = self.recent.counted()
        total = self.recent.total
        self.total.merge(self.recent)
        self.recent = SpaceSaving(self.recent.capacity, self.spec.num_rows)
        self._choices = min(self._choices + 1, _MOST_DOUBLINGS)
        self._asks_at = self._period()
        return found, total

    def _period(self) -> float:
        """Rows to serve between two choices: the first comes early, later ones ever more rarely."""
        pulls = 4 / self.spec.hot_share if self.spec.hot_share else 0.0
        return max(1.0, pulls / self.table.shards * (4 << self._choices if self.number else 1))

    def report(self) -> dict[str, Any]:
        """Counts for the end of a run, with as many of the hottest rows as a report needs."""
        whole = SpaceSaving(self.total.capacity)
        whole.merge(self.total)
        whole.merge(self.recent)
        found = whole.hottest(max(_REPORTED, self.spec.num_rows // 100))
        return {
            "rows": self.spec.num_rows,
            "held": len(self.table),
            "pulls": whole.total,
            "before": self.before,
            "served": self.served,
            "by_owner": self._count_owners().tolist(),
            "copies": len(self.ids),
            "ids": found.ids.tolist(),
            "counts": found.counts.tolist(),
            "errors": found.errors.tolist(),
        }

    def choose(self, number: int, ids: Ids, publish: bool) -> None:
        """Take a newer set, or publish the present one; an older one has no effect."""
        if number > self.number:
            if len(ids) > max_hot_rows(self.spec) or (np.diff(ids) <= 0).any():
                raise Refused(f"{len(ids)} hot rows of {self.spec} are too many or not in order")
            self.spec.check(torch.from_numpy(ids))
            self.number = number
            self._choices = 0
            self._asks_at = min(self._asks_at, self._period())
            self.is_published = False
            self.has_copies |= len(ids) > 0
            self._set(ids)
        if number == self.number and publish:
            self.is_published = True

    def clear(self) -> None:
        """The rows of the table were replaced: no copy is right any more."""
        self.number += 1
        self.is_published = False
        self._forget()

    def _forget(self) -> None:
        self._known = IdMap(np.zeros(0, np.int64), self.spec.num_rows)
        self._versions = np.full(self.table.shards, NO_VERSION)
        self._rows = torch.zeros(0, self.spec.dim)
        self._has_row = np.zeros(0, np.bool_)
        self._set(self.ids)

    @property
    def ids(self) -> Ids:
        """The hot set, in ascending order."""
        return self._known.ids

    def _set(self, ids: Ids) -> None:
        """Copies of rows that stay in the set stay, as of the version that they have."""
        kept = self._known.find(ids)
        places = np.flatnonzero(kept >= 0)
        rows = torch.zeros(len(ids), self.spec.dim)
        copy_rows(self._rows, kept[places], rows, places)
        has_row = np.zeros(len(ids), np.bool_)
        has_row[places] = self._has_row[kept[places]]
        self._known = IdMap(ids, self.spec.num_rows)
        is_small = self.spec.num_rows <= MAX_DIRECT_ROWS
        self._copied = np.zeros(self.spec.num_rows if is_small else 0, np.int32)
        if is_small:
            self._copied[ids[has_row]] = np.flatnonzero(has_row) + 1
        self._rows = rows
        self._has_row = has_row
        self._owners = self.spec.owner(torch.from_numpy(ids), self.table.shards).numpy()
        others = np.unique(self._owners)
        self._other_owners = others[others != self.index]
        self._copies = (self._copied, 0, rows.numpy())
        self._note_versions()
        self._own_ids = torch.from_numpy(ids[self._owners == self.index])
        self._published = torch.zeros(len(self._own_ids), self.spec.dim)
        self._changed_at = torch.full((len(self._own_ids),), NO_VERSION)
        self._published_at = NO_VERSION

    def changes(self, sent: tuple[int, int], version: int) -> RowChanges:
        """What a server lacks that has set `sent[0]` as of version `sent[1]`."""
        if self._published_at != version:
            self._publish(version)
        since = sent[1] if sent[0] == self.number else NO_VERSION - 1
        is_new = self._changed_at > since
        return RowChanges(self.number, version, self._own_ids[is_new], self._published[is_new])

    def _publish(self, version: int) -> None:
        """Rows that are not read differently now have not changed."""
        rows = self.table.pull(self._own_ids)
        is_first = self._published_at == NO_VERSION
        has_changed = (rows != self._published).any(1)
        self._changed_at[has_changed | is_first] = version
        self._published = rows
        self._published_at = version

    def serve(self, ids: Ids, copies: int, version: int, target: Rows, places: Ids | None) -> bool:
        """All rows of a pull, the first ones copies, in one native call; False if it cannot."""
        owned = self.table.direct
        if owned is None or (copies and self._fresh < max(0, version)):
            return False
        counts = self.recent.array
        copy_counts = self._copies_served.array if copies else None
        if (
            native.rows.gather(
                ids,
                places,
                copies,
                4 * self.spec.dim,
                target,
                self._copies,
                owned,
                counts,
                copy_counts,
            )
            >= 0
        ):
            return False
        self.recent.add(ids, is_counted=True)
        if copies:
            self._copies_served.add(ids[:copies], is_counted=True)
        self._add_served(len(ids), len(ids) - copies)
        return True

    def _note_versions(self) -> None:
        """The version that all copies have at least."""
        self._fresh = int(self._versions[self._other_owners].min(initial=_ANY_VERSION))

    def install(self, owner: int, copied: RowChanges) -> None:
        """Rows of another server; those of an older set are skipped."""
        if copied.number != self.number:
            return
        self.spec.check(copied.ids)
        positions = self._known.find(copied.ids.numpy())
        if (positions < 0).any() or (self._owners[positions] != owner).any():
            raise Refused(f"server {owner} publishes rows of {self.spec} that are not its hot rows")
        copy_rows(copied.rows, None, self._rows, positions)
        if len(self._copied):
            self._copied[copied.ids.numpy()] = positions + 1
        self._has_row[positions] = True
        self._versions[owner] = copied.version
        self._note_versions()

    def lose(self, owner: int) -> None:
        """Nothing comes from that server any more: its copies are not used."""
        self._versions[owner] = NO_VERSION
        self._note_versions()

    def look(self, ids: Ids, version: int) -> FoundCopies:
        """Copies of these rows of the table that are not older than `version`."""
        positions = self._known.find(ids)
        if not len(self.ids):
            return FoundCopies(positions, positions >= 0)
        is_fresh = (self._versions >= max(0, version))[self._owners[positions]]
        is_fresh &= self._has_row[positions]
        is_fresh &= positions >= 0
        return FoundCopies(positions, is_fresh)

    def read(self, found: FoundCopies, target: Rows, places: Ids | None = None) -> None:
        """Fill in those copies that are new enough, at their places; None: 0, 1, 2, …"""
        positions = found.positions
        if not found.is_fresh.all():
            fresh = np.flatnonzero(found.is_fresh)
            positions = positions[fresh]
            places = fresh if places is None else places[fresh]
        copy_rows(self._rows, positions, torch.from_numpy(target), places)
