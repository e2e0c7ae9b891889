"""Attacks that take minutes: kills, stops, floods, hostile frames, damaged files.

`make chaos` runs all of them; `python -m tests.chaos.NAME --count N --seed S` runs one.
"""
