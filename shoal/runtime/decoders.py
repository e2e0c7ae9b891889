"""Decoders of msgspec by type, made under one lock.

msgspec inspects a type when it first meets it, and crashes if two threads do so at once.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_making = threading.Lock()
_msgpack: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_json: dict[type, msgspec.json.Decoder[Any]] = {}


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    decoder = _msgpack.get(kind)
    if decoder is None:
        with _making:
            decoder = _msgpack[kind] = msgspec.msgpack.Decoder(kind)
    return decoder


def lax_json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """It takes numbers in strings, too."""
    decoder = _json.get(kind)
    if decoder is None:
        with _making:
            decoder = _json[kind] = msgspec.json.Decoder(kind, strict=False)
    return decoder
