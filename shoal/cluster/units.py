"""Sizes, times and rates: text to numbers, and back.

`B` is a byte and `b` a bit, so 200 Gb/s are 25 GB/s; prefixes are written small or large. `k` is
1000, `Ki` is 1024.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from shoal.errors import BadInput

_PREFIXES = {"": 1}
_PREFIXES |= {prefix: 1000**power for power, prefix in enumerate("kmgt", 1)}
_PREFIXES |= {f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", 1)}
_BITS_IN = {"B": 8, "byte": 8, "bytes": 8, "b": 1, "bit": 1, "bits": 1}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_SECONDS |= {"min": 60.0, "h": 3600.0, "d": 86400.0, "days": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zµμ/]*)\s*", re.IGNORECASE)
_UNIT = re.compile(r"([kmgtKMGT]?i?)(B|b|bytes?|bits?)")


def parse_bytes(text: str) -> int:
    """`100MB` is 100,000,000, `64KiB` is 65,536, `512` is 512, and `8Gb` is 1,000,000,000."""
    number, unit = _split(text)
    width = 1.0 if unit == "" else _bytes_in(unit)
    if width is None:
        raise BadInput(
            f"{text!r} is not a size: write a number of bytes, 100MB or 64KiB (8Gb are bits: 1 GB)"
        )
    return round(number * width)


def parse_seconds(text: str) -> float:
    """`10us`, `0.1ms`, `1e-5`, `8h`."""
    number, unit = _split(text)
    if unit.lower() not in _SECONDS:
        raise BadInput(f"{text!r} is not a time: write seconds, 10us, 0.1ms or 8h")
    return number * _SECONDS[unit.lower()]


def parse_s_per_byte(text: str) -> float:
    """`1e-10` seconds per byte, or the same as a rate: `10GB/s`, `80Gb/s`, `80Gbps`."""
    number, unit = _split(text)
    if unit == "":
        return number
    rate = parse_bytes_per_s(text)
    if rate is None:
        raise BadInput(
            f"{text!r} is not a cost per byte: write seconds, or a rate such as 10GB/s or 80Gb/s"
        )
    return 1 / rate


def parse_bytes_per_s(text: str) -> float | None:
    """`1Gb/s` and `1Gbps` are 125,000,000; None where it is no rate."""
    number, unit = _split(text)
    for end in ("/s", "ps"):
        width = _bytes_in(unit[: -len(end)]) if unit.endswith(end) else None
        if width is not None and number > 0:
            return number * width
    return None


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None or not math.isfinite(float(match[1])):
        return 0.0, "?"
    return float(match[1]), match[2]


def _bytes_in(unit: str) -> float | None:
    """Bytes in one `GB`, `Gb`, `KiB`; None where it is no unit of data."""
    match = _UNIT.fullmatch(unit)
    if match is None or match[1].lower() not in _PREFIXES:
        return None
    return _PREFIXES[match[1].lower()] * _BITS_IN[match[2]] / 8


@lru_cache(maxsize=10_000)
def show_rate(bytes_per_s: float) -> str:
    """In bits and in bytes: 200 Gb/s = 25 GB/s."""
    bits = show_bytes(bytes_per_s * 8)
    return f"{bits[:-1]}b/s = {show_bytes(bytes_per_s)}/s"


def show_bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if number >= size * 0.9995:
            return f"{_three(number / size)} {unit}"
    return f"{_three(number)} B"


def show_seconds(number: float) -> str:
    """As 1.61 days, 2.5 h, 600 s, 12.3 ms."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if number >= size * 0.9995:
            return f"{_three(number / size)} {unit}"
    return f"{_three(number * 1e9)} ns"


def _three(number: float) -> str:
    """Three digits, as 175, 17.6, 1.4."""
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
