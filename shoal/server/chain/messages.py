"""What copies of a chain say to each other, and what a node asks of the process around it."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from shoal.server.chain import ChainConfig, Entry, Number

# ---------------------------------------------------------------------- messages


class ChainFrame(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base of all messages. `epoch` is the sender's."""

    epoch: Number


class Append(ChainFrame, frozen=True):
    """To the successor: the next operation. The sender knows `committed` to be committed."""

    position: Number
    committed: Number
    op: Any


class Acked(ChainFrame, frozen=True):
    """To the predecessor: the tail, and so every member, has all up to `position`."""

    position: Number


class Greet(ChainFrame, frozen=True):
    """To a successor, or from the tail to a learner, first of all: where are you?"""


class At(ChainFrame, frozen=True):
    """To the predecessor: my log ends at `position`, send what follows; `committed` as in Acked."""

    position: Number
    committed: Number


class Stale(ChainFrame, frozen=True):
    """Your epoch has ended: find out which one it is now."""


class Learn(ChainFrame, frozen=True):
    """From a learner to the tail: send me what follows `position`, or a snapshot."""

    incarnation: Number
    position: Number


class Teach(ChainFrame, frozen=True):
    """From the tail to a learner: the next committed operation."""

    position: Number
    op: Any


class Taught(ChainFrame, frozen=True):
    """From a learner to the tail: I have all up to `position`."""

    incarnation: Number
    position: Number


class TooOld(ChainFrame, frozen=True):
    """From the tail to a learner: your state cannot be continued; begin again with none."""

    incarnation: Number


class Ask(ChainFrame, frozen=True):
    """To every other member, for a read without a lease: are you still in this epoch?"""

    number: Number


class Confirm(ChainFrame, frozen=True):
    """Yes: when I answered, I had joined no later epoch and could not have been replaced."""

    number: Number


ChainMessage: TypeAlias = (
    Append | Acked | Greet | At | Stale | Learn | Teach | Taught | TooOld | Ask | Confirm
)

# these are served while operations are applied; others when all that is logged is
WHILE_APPLYING = (Append, Acked, Ask, Confirm, Teach)

# ---------------------------------------------------------------------- effects


class Send(msgspec.Struct, frozen=True):
    """Send a message to a copy. If there is no connection, drop it: `link_up` repairs."""

    to: int
    message: ChainMessage


class Refetch(msgspec.Struct, frozen=True):
    """Ask the coordinator for the configuration and give it to `reconfigure`."""


class ChangeConfig(msgspec.Struct, frozen=True):
    """Write this configuration, again and again, until a later epoch is known."""

    config: ChainConfig


class SendSnapshot(msgspec.Struct, frozen=True):
    """Send the state as it is now to a learner, which calls `install`."""

    to: int
    incarnation: int
    position: int


class Reset(msgspec.Struct, frozen=True):
    """This node is of no more use: make a new one, without state, with a larger incarnation."""


class Disconnect(msgspec.Struct, frozen=True):
    """Break the connection to a learner that is too slow, with all that waits to be sent to it."""

    to: int


# an entry is to be applied; its client hears of it when it is committed (eventual: now)
Effect: TypeAlias = Send | Entry | Refetch | ChangeConfig | SendSnapshot | Reset | Disconnect
