"""Numbers and nouns in sentences."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun.

    >>> [counted(1, "worker"), counted(2, "worker"), counted(3, "switch", "switches")]
    ['1 worker', '2 workers', '3 switches']
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
