"""Decoders of msgspec and syntax trees of Python, each made by one thread at a time.

msgspec inspects a type when it first meets it, and crashes if two threads do so at once. CPython
counts how deep a syntax tree is in one place for all threads: where two of them make trees at once,
`ast.parse` may raise SystemError ("AST constructor recursion depth mismatch").
"""

from __future__ import annotations

import ast
import os
import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_making = threading.Lock()
_parsing = threading.Lock()
for _lock in (_making, _parsing):  # a fork of one thread must not find that another one has it
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
_msgpack: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_json: dict[type, msgspec.json.Decoder[Any]] = {}


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    if kind not in _msgpack:
        with _making:
            _msgpack[kind] = msgspec.msgpack.Decoder(kind)
    return _msgpack[kind]


def decode_msgpack(data: bytes, kind: type[T]) -> T:
    """ValueError, in one sentence, where it is none: types, text that is no UTF-8, too deep."""
    try:
        return msgpack_decoder(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"not a valid {kind.__name__}: {error}") from error


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """The same; it takes numbers in strings, too."""
    try:
        return lax_json_decoder(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"not a valid {getattr(kind, '__name__', 'message')}: {error}") from error


def lax_json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    if kind not in _json:
        with _making:
            _json[kind] = msgspec.json.Decoder(kind, strict=False)
    return _json[kind]


def convert(value: Any, kind: type[T]) -> T:
    """Raises what `msgspec.convert` raises."""
    with _making:
        return msgspec.convert(value, kind)


def parse_expression(text: str) -> ast.Expression:
    """Raises what `ast.parse` raises."""
    with _parsing:
        return ast.parse(text, mode="eval")


def parse_module(text: str) -> ast.Module:
    """Raises what `ast.parse` raises."""
    with _parsing:
        return ast.parse(text)
