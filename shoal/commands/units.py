"""Sizes, times and rates: text to numbers, and back."""

from __future__ import annotations

import re

from shoal.errors import BadInput

_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_BYTES |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`100MB` is 100,000,000, `64KiB` is 65,536, `512` is 512."""
    number, unit = _split(text)
    if unit not in _BYTES:
        raise BadInput(f"{text!r} is not a size: write a number of bytes, 100MB or 64KiB")
    return round(number * _BYTES[unit])


def parse_seconds(text: str) -> float:
    """`10us`, `0.1ms`, `1e-5`."""
    number, unit = _split(text)
    if unit not in _SECONDS:
        raise BadInput(f"{text!r} is not a time: write seconds, 10us or 0.1ms")
    return number * _SECONDS[unit]


def parse_s_per_byte(text: str) -> float:
    """`1e-10` seconds per byte, or the same as a rate: `10GB/s`."""
    number, unit = _split(text)
    if unit == "":
        return number
    if unit.endswith("/s") and unit[:-2] in _BYTES and number > 0:
        return 1 / (number * _BYTES[unit[:-2]])
    raise BadInput(f"{text!r} is not a cost per byte: write seconds, or a rate such as 10GB/s")


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return 0.0, "?"
    return float(match[1]), match[2].lower()


def show_bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if number >= size * 0.9995:
            return f"{_three(number / size)} {unit}"
    return f"{_three(number)} B"


def show_seconds(number: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if number >= size * 0.9995:
            return f"{_three(number / size)} {unit}"
    return f"{_three(number * 1e9)} ns"


def _three(number: float) -> str:
    """Three digits, as 175, 17.6, 1.4."""
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
