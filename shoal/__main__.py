"""`python -m shoal` and `shoal`: the command line, which Ctrl-C ends also while it is loaded."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from shoal.commands.cli import main as run

        run()
    except KeyboardInterrupt:  # while modules of the command were loaded
        print("shoal: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
