"""Hugging Face's models under tensor parallelism are those of one worker."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.replica.tensor.planning.plan import plan_of
from shoal.strategy.split_terms import Tp
from tests.conftest import World
from tests.huggingface import MODELS, Samples, loss
from tests.splitting import SGD, assert_equal

pytest.importorskip("transformers", reason="transformers is not installed")

# norms over all heads, biases of all heads, and one that has an adapter of its own
NOT_BY_HEADS = ("olmo2", "bloom", "gpt2")


@pytest.mark.whole
@pytest.mark.parametrize("name", MODELS)
def test_its_attention_is_split_by_heads(name: str) -> None:
    kinds = {role.kind for role in plan_of(MODELS[name][0](), Tp(2)).values()}
    assert {"column", "row"} <= kinds
    assert ("heads" in kinds) == (name not in NOT_BY_HEADS)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["tp(2)", "tp(4)", "ddp + tp(2)"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_on_one_worker(world: World, name: str, strategy: str) -> None:
    make, kind = MODELS[name]
    size = 2 if strategy == "tp(2)" else 4
    options: dict[str, Any] = {"loss": loss, "optimizer": SGD, "clip_norm": 1.0}
    assert_equal(world, size, strategy, make, Samples(kind, 12), 4, **options)
