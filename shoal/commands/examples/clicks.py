"""Train a small recommendation model on a click log.

    python -m shoal.commands.examples.clicks                     one worker, some seconds
    shoal train clicks --rows 10000000 --dim 32         a large table; only used rows take memory
    shoal run clicks --dense                            with nn.Embedding(sparse=True) instead

The log is generated, the same every time. A sample has ids of a user, an item, a page and an
advertiser, all rows of one table, and three numbers. Ids follow a power law: a few are in every
batch, most are seen once or never. Each id carries a hidden taste, and the chance of a click
follows from the tastes of the ids in a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.commands.examples.options import OptionParser, Options, batches, count
from shoal.server.embedding.module import RowOptions
from shoal.server.embedding.spec import TableSpec

FIELDS = 4  # user, item, page, advertiser: a quarter of the rows each
NUMBERS = 3
EXPONENT = 1.2  # the k-th most frequent id comes k**1.2 times as rarely as the first
NUM_TEST = 10_000
HOT_SHARE = 2e-4
_HOT = "rows over this share of all pulls are copied to all servers (%(default)s; 0: none)"


def train(job: shoal.Job, options: Options | None = None) -> None:
    options = options or read_options()
    train_set, test_set = load_clicks(options.samples, options.rows, options.frequent_first)
    of_rows = {name: getattr(options, name) for name in RowOptions.__annotations__}
    step = job.step(
        ClicksNet(options.rows, options.dim, options.dense, cast(RowOptions, of_rows)),
        F.binary_cross_entropy_with_logits,
        optimizer=partial(torch.optim.Adagrad, lr=options.lr),
        **options.of_step,
    )
    for batch in batches(job, train_set, options, "clicks"):
        job.log(loss=step(batch))
    results = test(job, test_set)
    job.print(
        f"test loss {results['loss']:.4f} (the click rate alone: {results['base_loss']:.4f}), "
        f"accuracy {results['accuracy']:.2%}"
    )


def evaluate(job: shoal.Job, checkpoint: str, about: dict[str, Any]) -> dict[str, float]:
    """Test a checkpoint of this script."""
    options = about["options"]
    counts = (options.get("min_count", 1), options.get("ttl_steps"))
    lifetime: RowOptions = {"min_count": counts[0], "ttl_steps": counts[1]}
    job.step(
        ClicksNet(options["rows"], options["dim"], options["dense"], lifetime),
        F.binary_cross_entropy_with_logits,
        optimizer=partial(torch.optim.Adagrad, lr=options["lr"]),
    )
    job.load(checkpoint)
    frequent_first = options.get("frequent_first", False)
    return test(job, load_clicks(options["samples"], options["rows"], frequent_first)[1])


def test(job: shoal.Job, test_set: TensorDataset) -> dict[str, float]:
    """Loss and accuracy, and the loss of predicting the click rate for every sample."""
    results: dict[str, float] = job.evaluate(metrics, test_set, batch_size=1024)
    rate = results.pop("rate")
    return {**results, "base_loss": -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)}


def metrics(logits: Tensor, clicks: Tensor) -> dict[str, Tensor]:
    return {
        "loss": F.binary_cross_entropy_with_logits(logits, clicks),
        "accuracy": ((logits > 0) == (clicks > 0.5)).float().mean(),
        "rate": clicks.mean(),
    }


class ClicksNet(nn.Module):
    """(batch, 4 ids and 3 numbers) to the logit of a click."""

    def __init__(self, rows: int, dim: int, dense: bool = False, options: RowOptions | None = None):
        super().__init__()
        self.rows: nn.Module
        if dense:
            torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
            self.rows = nn.Embedding(rows, dim, sparse=True)
            nn.init.normal_(self.rows.weight, std=0.1)
        else:
            self.rows = shoal.Embedding(rows, dim, scale=0.1, **(options or {}))
        self.layers = nn.Sequential(
            nn.Linear(FIELDS * dim + NUMBERS, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, sample: Tensor) -> Tensor:
        vectors = self.rows(sample[:, :FIELDS].long()).flatten(1)
        numbers = sample[:, FIELDS:].to(vectors.dtype)
        logits: Tensor = self.layers(torch.cat([vectors, numbers], dim=1))
        return logits.squeeze(1)


# ------------------------------------------------------------------------------ the data


@cache  # virtual workers share it
def load_clicks(
    samples: int, rows: int, frequent_first: bool = False
) -> tuple[TensorDataset, TensorDataset]:
    """`samples` samples to train on, and 10,000 to test on."""
    inputs, clicks = generate(samples + NUM_TEST, rows, frequent_first)
    return (
        TensorDataset(inputs[NUM_TEST:], clicks[NUM_TEST:]),
        TensorDataset(inputs[:NUM_TEST], clicks[:NUM_TEST]),
    )


def generate(samples: int, rows: int, frequent_first: bool = False) -> tuple[Tensor, Tensor]:
    """[samples, 4 ids and 3 numbers] in float64, which holds both exactly, and the clicks.

    Each kind has a quarter of the ids; with `frequent_first` kinds take turns, so that low ids of
    the whole table are the most frequent, as in a table whose oldest users are its busiest.
    """
    if rows < FIELDS:
        raise shoal.BadInput(f"{rows} rows are too few for ids of {FIELDS} kinds")
    random = np.random.RandomState(0)  # numpy keeps its stream across versions
    ids = power_law(random.random_sample((samples, FIELDS)), rows // FIELDS)
    if frequent_first:
        ids = ids * FIELDS + np.arange(FIELDS)
    else:
        ids += np.arange(FIELDS) * (rows // FIELDS)
    numbers = random.standard_normal((samples, NUMBERS))
    chance = 1 / (1 + np.exp(-appeal(ids, numbers)))
    clicks = random.random_sample(samples) < chance
    return torch.from_numpy(np.hstack([ids, numbers])), torch.from_numpy(clicks).float()


def power_law(uniform: Any, size: int) -> Any:
    """Numbers from [0, 1) to ids below `size`, the first of which is the most frequent."""
    power = 1 - EXPONENT
    ranks = (((size + 1.0) ** power - 1) * uniform + 1) ** (1 / power)
    return np.minimum(ranks, size).astype(np.int64) - 1


def appeal(ids: Any, numbers: Any) -> Any:
    """The logit of a click: every id has its own weight, and users and items have a taste."""
    hidden = TableSpec("tastes", int(ids.max()) + 1, 4)
    tastes = hidden.initial(torch.from_numpy(ids.ravel())).numpy().reshape(*ids.shape, 4)
    match = (tastes[:, 0, 1:] * tastes[:, 1, 1:]).sum(1)  # of the user's and the item's
    return tastes[:, :, 0].sum(1) + match + numbers @ [0.5, -0.5, 0.25] - 1.5


# ------------------------------------------------------------------------------ the options


def read_options(argv: Sequence[str] | None = None) -> Options:
    about = "Train a small recommendation model on a generated click log."
    parser = OptionParser("clicks", about, epochs=1, batch_size=256, lr=0.1)
    add = parser.add_argument
    add("--rows", type=count, default=100_000, help="rows of the table (%(default)s)")
    add("--dim", type=count, default=16, help="numbers in a row (%(default)s)")
    add("--samples", type=count, default=100_000, help="samples to train on (%(default)s)")
    add("--dense", action="store_true", help="keep the table in the model: nn.Embedding")
    add("--placement", choices=["hash", "range"], default="hash", help="of rows on servers")
    add("--min-count", type=count, default=1, metavar="K", help="train a row from its K-th sight")
    add("--ttl-steps", type=count, metavar="T", help="rows leave that T steps do not see")
    add("--hot-share", type=float, default=HOT_SHARE, help=_HOT)
    add("--cache-steps", type=int, default=0, help="steps for which workers keep rows")
    add("--frequent-first", action="store_true", help="low ids are the most frequent")
    return parser.read(argv)


if __name__ == "__main__":
    shoal.run(train)
