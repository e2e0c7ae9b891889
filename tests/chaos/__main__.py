"""Run every attack in this folder, one after the other; exit with 1 if one of them failed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    failed: list[str] = []
    for name in sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py")):
        print(f"== {name}", flush=True)
        start = time.monotonic()
        status = subprocess.run([sys.executable, "-m", f"tests.chaos.{name}"], check=False)
        outcome = "passed" if status.returncode == 0 else f"FAILED ({status.returncode})"
        print(f"== {name}: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
        if status.returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all attacks were survived")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
