"""The table of messages."""

from __future__ import annotations

from shoal.server import session
from shoal.server.peer import HANDLERS
from shoal.server.protocol.frames import FrameKind

HANDSHAKE = {FrameKind.CHALLENGE, FrameKind.HELLO, FrameKind.WELCOME}
ANSWERS = {FrameKind.OK, FrameKind.ERROR}
TO_FOLLOWERS = {FrameKind.ENTRY, FrameKind.COPIED_ROWS}
OTHER_LISTENERS = {FrameKind.COORDINATE}


def test_every_request_has_a_handler() -> None:
    apart = HANDSHAKE | ANSWERS | TO_FOLLOWERS | OTHER_LISTENERS
    assert set(FrameKind) - apart == set(HANDLERS)


def test_a_handler_is_in_one_of_the_modules_that_a_session_imports() -> None:
    modules = {module.__name__ for module in session.HANDLER_MODULES}
    assert {registered.handler.__module__ for registered in HANDLERS.values()} == modules
