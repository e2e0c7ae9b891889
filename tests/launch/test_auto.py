"""What `strategy="auto"` chooses, without a machine that is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.launch.rank import auto
from shoal.runtime.config import RunConfig
from tests.plan.test_search import MODEL, cluster, found


def write(config: RunConfig, document: dict[str, object]) -> None:
    assert config.workload_trace.folder is not None
    file = Path(config.workload_trace.folder) / "workload.json"
    file.write_text(json.dumps(document))


def test_one_worker_is_single_without_a_trace() -> None:
    said: list[str] = []
    chosen = auto.choose_strategy(1, RunConfig(), lambda workers, config: None, said.append)
    assert str(chosen) == "single" and len(said) == 1


def test_a_model_that_cannot_be_traced_gets_ddp_and_a_sentence() -> None:
    said: list[str] = []

    def run(workers: int, config: RunConfig) -> None:
        write(config, {"error": "no such operation"})

    assert str(auto.choose_strategy(2, RunConfig(), run, said.append)) == "ddp"
    assert said == ["auto: ddp, for the model could not be traced: no such operation"]


def test_a_script_without_a_step_gets_ddp() -> None:
    said: list[str] = []
    assert (
        str(auto.choose_strategy(2, RunConfig(), lambda workers, config: None, said.append))
        == "ddp"
    )
    assert "without a training step" in said[0]


def test_the_plainest_of_equally_fast_strategies_is_chosen() -> None:
    ranked = found(80).ranked
    fastest_s = min(one.seconds for one in ranked)
    chosen = auto.planned(MODEL, 16, cluster(80), 4, lambda text: None)
    splits = [len(o.candidate.strategy.splits) for o in ranked if o.seconds <= fastest_s * 1.02]
    assert len(chosen.splits) <= min(splits)
    assert chosen.is_synchronous


def test_what_is_chosen_is_said_in_one_line() -> None:
    said: list[str] = []
    chosen = auto.planned(MODEL, 16, cluster(80), 4, said.append)
    assert chosen.is_synchronous and len(said) == 1
    assert said[0].startswith(f"auto: {chosen}, ") and " a step (" in said[0]


def test_nothing_that_fits_is_refused() -> None:
    from shoal.plan.workloads.transformer_block import Transformer, TransformerSizes

    model = Transformer("large", TransformerSizes(4, 1024, 4, sequence=512))
    with pytest.raises(BadInput, match="nothing fits 1 MB on 2 workers"):
        auto.planned(model, 16, cluster(0.001), 2, lambda text: None)
