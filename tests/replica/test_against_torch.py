"""Pipelines and tensor parallelism give what torch.distributed's own give, over Gloo."""

from __future__ import annotations

from pathlib import Path

from tests.processes import findings


def test_gpipe_and_1f1b_give_the_gradients_of_torch(tmp_path: Path) -> None:
    for found in findings("tests.replica.pipelining", 2, tmp_path):
        assert set(found) == {"gpipe", "1f1b"}, found
        assert max(found.values()) < 1e-6


def test_a_tp_plan_gives_what_parallelize_module_gives(tmp_path: Path) -> None:
    for found in findings("tests.replica.dtensor", 2, tmp_path):
        assert set(found) == {"outputs", "slices", "gradients"}, found
        assert found["slices"] == 0.0
        assert max(found.values()) < 1e-6
