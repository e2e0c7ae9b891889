"""The metadata of messages about rows that are pulled often, and their copies."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.server.consistency import Count
from shoal.server.protocol.hello import WireMessage
from shoal.server.protocol.messages import Name

MAX_HOT_ROWS = 1 << 16  # of one table
MAX_ROW_MEMORIES = 8  # of one worker
_Address = Annotated[str, msgspec.Meta(max_length=512)]


class ShareRows(WireMessage, frozen=True):
    """Memory of a worker for the rows that it pulls; it replaces what had this number."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ROW_MEMORIES)]


class RowsPulled(WireMessage, frozen=True):
    """The answer to a pull; the rows are the payload.

    `hot` is the number of the present set of hot rows. `refresh`: the worker is asked to choose
    the next one. `missing`: rows at these positions have no copy here that is new enough.
    """

    hot: Count
    refresh: bool = False
    missing: tuple[Count, ...] = ()


class HeatRequest(WireMessage, frozen=True):
    """Ask for the counts since the last request."""

    table: Name


class Heat(WireMessage, frozen=True):
    """`count` ids and their counts in the payload, int64; `total` pulls of rows in all."""

    count: Count
    total: Count
    hot: Count


class HotRows(WireMessage, frozen=True):
    """Set `number` of hot rows: `count` ids in the payload, in ascending order.

    First every server learns the set, then owners `publish` their rows. `addresses` has all
    servers as the receiver reaches them. In an answer: the present set.
    """

    table: Name
    number: Count
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_HOT_ROWS)]
    publish: bool = False
    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=1 << 16)] = ()


class FollowRows(WireMessage, frozen=True):
    """Server `index` asks for the hot rows that the receiver owns, now and when they change."""

    index: Count


class CopiedRows(WireMessage, frozen=True):
    """Rows of set `number` that have changed: ids and rows are the payload.

    All hot rows of the sender are now those of `version`.
    """

    table: Name
    number: Count
    version: Count
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_HOT_ROWS)]
