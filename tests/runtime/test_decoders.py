"""Decoders that several threads ask for at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import msgspec

from shoal.runtime.decoders import lax_json_decoder, msgpack_decoder

THREADS = 4


def test_threads_that_meet_a_type_for_the_first_time_decode_it() -> None:
    inner = msgspec.defstruct("Inner", [("numbers", list[int])])
    kind = msgspec.defstruct("Outer", [("inner", inner), ("names", dict[str, inner])])  # type: ignore[valid-type]
    value = kind(inner([1]), {"a": inner([2])})
    begin = Barrier(THREADS)

    def decode() -> object:
        begin.wait()
        return msgpack_decoder(kind).decode(msgspec.msgpack.encode(value))

    with ThreadPoolExecutor(THREADS) as pool:
        assert [each.result() for each in [pool.submit(decode) for _ in range(THREADS)]] == [
            value
        ] * THREADS


def test_numbers_of_lax_json_may_be_in_strings() -> None:
    kind = msgspec.defstruct("Number", [("number", int)])
    assert lax_json_decoder(kind).decode(b'{"number": "7"}') == kind(7)
