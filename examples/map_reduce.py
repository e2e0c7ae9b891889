"""Map and reduce as a function of one's own: words counted by all workers.

Each worker maps its part of the files and reduces what it has; the results are reduced in the
order of the files, the same on every worker.

shoal run -n 2 examples/map_reduce.py
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import shoal


def count_words(file: Path) -> dict[str, int]:
    return dict(Counter(re.findall(r"[a-z]+", file.read_text(encoding="utf-8").lower())))


def add(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return dict(Counter(left) + Counter(right))


def main(job: shoal.Job) -> None:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    counts = job.map_reduce(count_words, files, add)
    for word, times in Counter(counts).most_common(5):
        job.print(f"{word:8} {times}")


if __name__ == "__main__":
    shoal.run(main)
