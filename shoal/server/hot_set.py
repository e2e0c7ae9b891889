"""The set of hot rows of a table, as a worker knows it; one worker chooses it for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from shoal.embedding.hashing import Ids
from shoal.embedding.id_map import IdMap
from shoal.embedding.spec import TableSpec
from shoal.server.client import Client
from shoal.server.link import ServerLink
from shoal.server.model.hot_table import max_hot_rows
from shoal.server.protocol.frames import FrameKind, Refused, decode, encode
from shoal.server.protocol.row_messages import Heat, HeatRequest, HotRows
from shoal.server.request import Request
from shoal.server.row_routing import hottest_rows
from shoal.server.shared_memory import bytes_of


@dataclass(frozen=True)
class HotSet:
    """Ids in ascending order, and the number of the set: the newest one holds."""

    number: int
    known: IdMap

    @property
    def ids(self) -> Ids:
        return self.known.ids


NO_ROWS = HotSet(0, IdMap(np.zeros(0, np.int64), 0))


def fetch_hot(link: ServerLink, spec: TableSpec) -> HotSet:
    """The present set of a server; empty while its rows are not published."""
    request = Request(FrameKind.TABLE_HOT_GET, encode(HeatRequest(spec.name)), into=None)
    meta, payload = link.post("rows", request).result()
    answer = decode(meta, HotRows)
    ids = _numbers(payload, answer.count)
    spec.check(torch.from_numpy(ids))
    is_coming = answer.count > 0 and not answer.publish
    return NO_ROWS if is_coming else HotSet(answer.number, IdMap(ids, spec.num_rows))


def refresh_hot(
    client: Client, spec: TableSpec, hot: HotSet, seen_by: Callable[[int], list[str]]
) -> HotSet:
    """Choose the rows over the share of all pulls, from the counts of all servers.

    `hot` is the present set. First every server learns the set, then the owners publish their rows.
    """
    found = [_counts(link, spec.name) for link in client.links]
    total = sum(heat.total for heat, _, _ in found)
    ids = hottest_rows(
        np.concatenate([ids for _, ids, _ in found]),
        np.concatenate([counts for _, _, counts in found]),
        spec.hot_share * total,
        max_hot_rows(spec),
        hot.ids,
    )
    workers = client.specs[0].rule.workers
    latest = max(heat.hot for heat, _, _ in found)
    number = (latest // workers + 1) * workers + client.rank  # no two workers have the same
    is_same = np.array_equal(ids, hot.ids)
    chosen = hot if is_same else HotSet(number, IdMap(ids, spec.num_rows))
    for publish in (False, True):
        for index, link in enumerate(client.links):
            addresses = () if publish else tuple(seen_by(index))
            message = HotRows(spec.name, chosen.number, len(ids), publish, addresses)
            payload = (bytes_of(torch.from_numpy(ids)),)
            link.post("rows", Request(FrameKind.TABLE_HOT_SET, encode(message), payload)).result()
    return chosen


def _counts(link: ServerLink, table: str) -> tuple[Heat, Ids, Ids]:
    request = Request(FrameKind.TABLE_HEAT, encode(HeatRequest(table)), into=None)
    meta, payload = link.post("rows", request).result()
    heat = decode(meta, Heat)
    numbers = _numbers(payload, 2 * heat.count)
    return heat, numbers[: heat.count], numbers[heat.count :]


def _numbers(payload: bytearray, count: int) -> Ids:
    if len(payload) != 8 * count:
        raise Refused(f"{len(payload)} bytes for {count} numbers")
    return np.frombuffer(payload, np.int64)
