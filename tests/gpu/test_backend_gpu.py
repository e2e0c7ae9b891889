"""Backend "shoal" with CUDA tensors, which are staged: two ranks share one GPU."""

from __future__ import annotations

import pytest

from shoal.transport.shm.segment import is_built
from tests.gpu.backend_worker import CASES, SIZE
from tests.processes import findings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_built(), reason="built without a compiler"),
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What each rank of one world of processes reports; they have all ended."""
    folder = tmp_path_factory.mktemp("shoal")
    return findings("tests.gpu.backend_worker", SIZE, folder, timeout_s=100)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_that_share_a_gpu(reports: list[dict[str, str | None]], case: str) -> None:
    for report in reports:
        assert report[case] is None, report[case]
