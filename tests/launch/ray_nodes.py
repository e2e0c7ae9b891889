"""A Ray cluster of several nodes on this host, in a process of its own that tests command.

python -m tests.launch.ray_nodes   reads `add RESOURCES` (JSON), `kill ID`, `state`, `store`
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
from typing import Any

CPUS = 2  # of each node
_STORE_BYTES = 80 << 20


class RayNodes:
    """Nodes of a cluster, at first none beside a head without CPUs."""

    def __init__(self) -> None:
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.ray_nodes"],
            env={**os.environ, **self.variables, "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.address = str(self._answer())

    def add(self, **resources: int) -> str:
        """Such as `num_cpus` (default 2); returns its id."""
        return str(self._ask(f"add {json.dumps({'num_cpus': CPUS, **resources})}"))

    def kill(self, prefix: str) -> None:
        """The node whose id begins so, as a host that loses its power: SIGKILL to its processes."""
        self._ask(f"kill {prefix}")

    def state(self) -> dict[str, Any]:
        """How many actors live, and how many placement groups there are."""
        answer: dict[str, Any] = self._ask("state")
        return answer

    def stored_bytes(self) -> int:
        """In the object stores of all nodes."""
        return int(self._ask("store"))

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(60)
        finally:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _ask(self, command: str) -> Any:
        assert self._process.stdin
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):  # Ray prints, too
                return json.loads(line)["answer"]
        raise AssertionError("the Ray cluster has ended")


def main() -> None:
    import ray
    from ray._private.state import actors
    from ray.cluster_utils import Cluster
    from ray.util.placement_group import placement_group_table

    def answer(value: Any) -> None:
        print(json.dumps({"answer": value}), flush=True)

    ray._private.worker._worker_logs_enabled = False  # of nodes that are killed
    size = {"object_store_memory": _STORE_BYTES}
    head = {"num_cpus": 0, "include_dashboard": False, **size}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes: list[Any] = []
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    answer(cluster.address)
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        if command == "add":
            resources = json.loads(rest)
            gpus = range(resources.get("num_gpus", 0))  # they need not exist, and tests hide all
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            nodes.append(cluster.add_node(**resources, **size))
            answer(nodes[-1].node_id)
        elif command == "kill":
            for node in list(nodes):
                if node.node_id.startswith(rest):
                    nodes.remove(node)
                    cluster.remove_node(node, allow_graceful=False)
            answer(len(nodes))
        elif command == "store":
            total, free = ray.cluster_resources(), ray.available_resources()
            answer(total["object_store_memory"] - free["object_store_memory"])
        else:
            alive = [a for a in actors().values() if a["State"] != "DEAD"]
            groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
            answer({"actors": len(alive), "groups": len(groups)})
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
