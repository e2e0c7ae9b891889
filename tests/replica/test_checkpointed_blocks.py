"""torch.utils.checkpoint inside of a model, under every strategy: blocks are computed twice."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import World
from tests.seeds import seeded
from tests.splitting import assert_equal, texts, workers


class Checkpointed(nn.Module):
    """As in the tutorials: each block is computed again in backward."""

    @seeded(0)
    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(256, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x)
        return logits


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


STRATEGIES = ["ddp", "zero(1)", "zero(2)", "zero(3)", 'ps(placement="rank0")', "tp(2)", "pp(2)"]
STRATEGIES += ["tp(2, sequence=True)", "cp(2)", "pp(2, recompute=True)", "tp(2) + pp(2)"]


@pytest.mark.product
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpointed_blocks_train_as_on_one_device(
    world: World, strategy: str, reentrant: bool
) -> None:
    size = workers(strategy)
    assert_equal(world, size, strategy, lambda: Checkpointed(reentrant), texts(16), loss=loss)
