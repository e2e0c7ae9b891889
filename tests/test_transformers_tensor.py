"""Hugging Face's models under tensor parallelism are those of one worker."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import World
from tests.huggingface import MODELS, Samples, loss
from tests.splitting import SGD, assert_equal

pytest.importorskip("transformers", reason="transformers is not installed")

SPLIT = 0.9  # of the parameters, at these sizes, where everything is understood


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["tp(2)", "tp(4)", "ddp + tp(2)"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_on_one_worker(world: World, name: str, strategy: str) -> None:
    make, kind = MODELS[name]
    size = 2 if strategy == "tp(2)" else 4
    options: dict[str, Any] = {"loss": loss, "optimizer": SGD, "clip_norm": 1.0}
    assert_equal(world, size, strategy, make, Samples(kind, 12), 4, **options)
