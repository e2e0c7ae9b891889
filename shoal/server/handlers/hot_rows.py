"""Rows that are pulled often: their counts, the hot set, and copies for other servers."""

from __future__ import annotations

import numpy as np
import torch

from shoal.server.handlers.dispatch import handles
from shoal.server.handlers.rows import check_size, read_numbers
from shoal.server.peer import Peer
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.row_messages import FollowRows, Heat, HeatRequest, HotRows
from shoal.server.shared_memory import bytes_of


@handles(FrameKind.TABLE_HEAT, "rows")
def get_heat(peer: Peer, header: Header, meta: bytes) -> None:
    """The counts of rows since the last request."""
    model, _ = peer.joined()
    name = decode(meta, HeatRequest).table
    with model.lock:
        model.tables.table(name)
        hot = model.tables.hot[name]
        found, total = hot.take_counts()
        number = hot.number
    numbers = torch.from_numpy(np.concatenate([found.ids, found.counts]))
    peer.reply(encode(Heat(len(found.ids), total, number)), bytes_of(numbers))


@handles(FrameKind.TABLE_HOT_GET, "rows")
def get_hot(peer: Peer, header: Header, meta: bytes) -> None:
    """The present set of hot rows."""
    model, _ = peer.joined()
    name = decode(meta, HeatRequest).table
    with model.lock:
        model.tables.table(name)
        hot = model.tables.hot[name]
        answer = HotRows(name, hot.number, len(hot.ids), hot.is_published)
        ids = torch.from_numpy(hot.ids)
    peer.reply(encode(answer), bytes_of(ids))


@handles(FrameKind.TABLE_HOT_SET, "rows", has_payload=True)
def set_hot(peer: Peer, header: Header, meta: bytes) -> None:
    """Take a set of hot rows, or publish those of this server."""
    model, _ = peer.joined()
    request = decode(meta, HotRows)
    model.tables.table(request.table)
    if request.addresses and len(request.addresses) != model.spec.servers:
        raise Refused(f"{len(request.addresses)} addresses of {model.spec.servers} servers")
    check_size(header, request.count, 8, 0)
    ids = read_numbers(peer.connection, request.count, torch.int64)
    with model.lock:
        model.tables.hot[request.table].choose(request.number, ids.numpy(), request.publish)
        model.lock.notify_all()
    if request.addresses:
        peer.host.follow_rows(peer.model_id, request.addresses)
    peer.reply()


@handles(FrameKind.FOLLOW_ROWS, "follow")
def follow_rows(peer: Peer, header: Header, meta: bytes) -> None:
    """Another server asks for the hot rows of this one, until the model is released."""
    peer.host.serve_rows(peer.model_id, decode(meta, FollowRows), peer.connection)
