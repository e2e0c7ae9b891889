"""`python -m shoal` and `shoal`: the command line, which Ctrl-C ends also while it is loaded."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from shoal.cli import main as run
    except KeyboardInterrupt:
        print("shoal: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
