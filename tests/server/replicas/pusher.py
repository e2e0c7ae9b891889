"""A worker process: it pushes the elements that it reads, and writes those acknowledged.

python -m tests.server.replicas.pusher REPLICAS RANK GENERATION WORKERS
"""

from __future__ import annotations

import sys

from shoal.runtime.config import RunConfig
from tests.server.replicas.processes import make_client
from tests.server.replicas.world import push_one_hot


def main() -> None:
    replicas, rank, generation, workers = map(int, sys.argv[1:])
    run_dir = RunConfig.from_environment().run_dir
    assert run_dir is not None
    client = make_client(run_dir, replicas, rank, generation, workers)
    step = client.enter().step if client.comes_back else 0
    for line in sys.stdin:
        push_one_hot(client, int(line), step)
        step += 1
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
