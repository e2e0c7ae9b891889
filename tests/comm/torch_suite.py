"""PyTorch's own tests of torch.distributed on this backend, gated as for Gloo.

`python -m tests.comm.torch_suite [names]` runs them with 2 ranks; without names, all.
With BACKEND=shoal in the environment they run under the backend's own name, which skips many.
torch asks `get_backend() == "gloo"` in many places, so the backend stands in for Gloo's class.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="torch-suite-"))

import torch
from torch.distributed import distributed_c10d
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

import shoal
from shoal.comm.select import share_memory
from shoal.comm.torch_backend.process_group import ShoalProcessGroup

# compares the name that DistributedDataParallel logs, so it is run under the own name
UNDER_OWN_NAME = {"test_ddp_logging_data_cpu"}


class StandIn(ShoalProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        executor = share_memory(store, rank, size, timeout.total_seconds())
        assert executor is not None
        super().__init__(executor)
        self.options = SimpleNamespace()

    def _set_sequence_number_for_group(self) -> None:
        return None


class TorchSuite(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    def setUp(self) -> None:
        super().setUp()
        start = torch.multiprocessing.get_context("fork").Process
        self._start_processes(start)


def main() -> None:
    args = sys.argv[1:]
    torch.set_num_threads(1)
    if os.environ["BACKEND"] == "shoal":
        shoal.register_backend()
    else:
        distributed_c10d.ProcessGroupGloo = StandIn  # type: ignore[misc, assignment]
        # the labels that Gloo's operations leave in a profile are Gloo's own
        distributed_test.PROFILING_SUPPORTED_BACKENDS = []
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []
    common_distributed.TIMEOUT_DEFAULT = 60
    loader = unittest.TestLoader()
    names = args or set(loader.getTestCaseNames(TorchSuite)) - UNDER_OWN_NAME
    suite = unittest.TestSuite(TorchSuite(name) for name in sorted(names))
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main()
