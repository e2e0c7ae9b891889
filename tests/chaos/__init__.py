"""Attacks that take minutes: kills, stops, floods, hostile frames, damaged files.

`make chaos` runs all of them; `python -m tests.chaos.NAME --count N --seed S` runs one.
"""

from __future__ import annotations

import argparse


def read_numbers(words: list[str] | None, **defaults: int) -> argparse.Namespace:
    """The numbers of `words` or of the command line, such as --count 40; --seed is 0."""
    parser = argparse.ArgumentParser()
    for name, default in {"seed": 0, **defaults}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(words)
