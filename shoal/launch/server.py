"""A server process of a run: `python -m shoal.launch.server`.

It dies with its launcher, as workers do; the rest is the server's own.
"""

from __future__ import annotations

import runpy

from shoal.launch.worker import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()
    runpy.run_module("shoal.server.main", run_name="__main__", alter_sys=True)
