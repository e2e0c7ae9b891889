"""Backend "shoal" with CUDA tensors, which are staged: two ranks share one GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.wire.segment import is_built
from tests.gpu.backend_worker import CASES, SIZE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not is_built(), reason="built without a compiler"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What each rank of one world of processes reports; they have all ended."""
    folder = tmp_path_factory.mktemp("shoal")
    with open(folder / "output", "wb") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.backend_worker", str(rank), str(folder)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(SIZE)
        ]
        try:
            for process in processes:
                process.wait(timeout=100)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    files = [folder / f"{rank}.json" for rank in range(SIZE)]
    assert all(f.is_file() for f in files), (folder / "output").read_text()
    return [json.loads(f.read_text()) for f in files]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_that_share_a_gpu(reports: list[dict[str, str | None]], case: str) -> None:
    for report in reports:
        assert report[case] is None, report[case]
