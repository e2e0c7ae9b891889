"""What `strategy="auto"` chooses, without a machine that is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.worker import auto
from tests.plan.test_search import MODEL, cluster, found


@pytest.mark.parametrize(
    ("workers", "document", "chosen", "words"),
    [
        (1, None, "single", ""),
        (2, None, "ddp", "without a training step"),
        (2, {"error": "no such operation"}, "ddp", "could not be traced: no such operation"),
    ],
)
def test_without_a_trace_one_worker_is_single_and_others_get_ddp_and_a_sentence(
    workers: int, document: dict[str, str] | None, chosen: str, words: str
) -> None:
    said: list[str] = []

    def run(workers: int, config: RunConfig) -> None:
        folder = config.workload_trace.folder
        assert folder is not None
        if document:
            (Path(folder) / "workload.json").write_text(json.dumps(document))

    assert str(auto.choose_strategy(workers, RunConfig(), run, said.append)) == chosen
    assert len(said) == 1 and words in said[0]


def test_the_plainest_of_equally_fast_strategies_is_chosen_and_said_in_one_line() -> None:
    ranked = found(80).ranked
    fastest_s = min(one.seconds for one in ranked)
    said: list[str] = []
    chosen = auto.planned(MODEL, 16, cluster(80), 4, said.append)
    splits = [len(o.candidate.strategy.splits) for o in ranked if o.seconds <= fastest_s * 1.02]
    assert len(chosen.splits) <= min(splits)
    assert chosen.is_synchronous and len(said) == 1
    assert said[0].startswith(f"auto: {chosen}, ") and " a step (" in said[0]


def test_nothing_that_fits_is_refused() -> None:
    from shoal.plan.workloads.transformer_block import Transformer, TransformerSizes

    model = Transformer("large", TransformerSizes(4, 1024, 4, sequence=512))
    with pytest.raises(BadInput, match="nothing fits 1 MB on 2 workers"):
        auto.planned(model, 16, cluster(0.001), 2, lambda text: None)
