"""What an embedding table is, as values that can be sent: its size, its start, its optimizer."""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.embedding.hashing import Ids, Permutation, key_of, random_words
from shoal.errors import BadInput

Kind = Literal["sgd", "adagrad", "adam"]
Init = Literal["normal", "uniform", "zeros"]
LARGEST_SHARD = 2**31 - 2  # rows of one shard: their places are int32
LARGEST_TABLE = 2**62

# what of a torch optimizer is meaningful for rows, and what does not change its arithmetic
_CLASSES: dict[type, tuple[Kind, set[str]]] = {
    torch.optim.SGD: ("sgd", {"lr"}),
    torch.optim.Adagrad: ("adagrad", {"lr", "eps", "initial_accumulator_value"}),
    torch.optim.Adam: ("adam", {"lr", "betas", "eps"}),
    torch.optim.SparseAdam: ("adam", {"lr", "betas", "eps"}),
}
_SWITCHES = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


@dataclass(frozen=True)
class RowOptimizer:
    """How a row changes by its gradient. Rows without a gradient in a step stay as they are.

    sgd       row -= lr g
    adagrad   sum += g²;  row -= lr g / (√sum + eps)
    adam      as torch.optim.SparseAdam: the averages of a row move only in steps that touch it,
              and the bias is corrected by the number of updates of the table, not of the row
    """

    kind: Kind
    lr: float
    eps: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    initial_sum: float = 0.0  # what Adagrad's sums start from

    def __post_init__(self) -> None:
        if self.kind not in ("sgd", "adagrad", "adam"):
            raise BadInput(f'rows are trained by "sgd", "adagrad" or "adam", not {self.kind!r}')
        for name in ("lr", "eps", "initial_sum"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise BadInput(f"{name} of a row optimizer is a number from 0 on, not {value!r}")
        pair = self.betas
        if len(pair) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in pair):
            raise BadInput(f"betas of a row optimizer are two numbers from 0 to 1, not {pair!r}")

    @classmethod
    def of(cls, factory: Any) -> RowOptimizer:
        """The same as a torch optimizer, such as `functools.partial(torch.optim.Adagrad, lr=0.1)`.

        SGD without momentum, Adagrad, Adam and SparseAdam; both of the latter become "adam".
        """
        if isinstance(factory, RowOptimizer):
            return factory
        is_partial = isinstance(factory, functools.partial)
        made: Any = factory.func if is_partial else factory
        given: dict[str, Any] = factory.keywords if is_partial else {}
        if not isinstance(made, type) or made not in _CLASSES or (is_partial and factory.args):
            raise _refusal(getattr(made, "__name__", repr(made)))
        kind, known = _CLASSES[made]
        parameters = inspect.signature(made).parameters
        for name, value in given.items():
            if name in known or name in _SWITCHES:
                continue
            if name not in parameters or value != parameters[name].default:
                raise _refusal(f"{made.__name__}({name}={value!r})")
        values = {name: given.get(name, parameters[name].default) for name in known}
        beta1, beta2 = values.get("betas", (0.0, 0.0))
        return cls(
            kind,
            lr=float(values["lr"]),
            eps=float(values.get("eps", 0.0)),
            betas=(float(beta1), float(beta2)),
            initial_sum=float(values.get("initial_accumulator_value", 0.0)),
        )

    def initial_state(self) -> dict[str, float]:
        """What is kept beside each row, and what it starts from."""
        return {
            "sgd": {},
            "adagrad": {"sum": self.initial_sum},
            "adam": {"exp_avg": 0.0, "exp_avg_sq": 0.0},
        }[self.kind]


@dataclass(frozen=True)
class TableSpec:
    """A table as all its shards and users know it. What a row starts as, and which shard owns it,
    follow from this value alone."""

    name: str
    num_rows: int
    dim: int
    init: Init = "normal"  # N(0, scale²), uniform from -scale to scale, or zeros
    scale: float = 1.0
    seed: int = 0
    optimizer: RowOptimizer | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.num_rows, LARGEST_TABLE):
            raise BadInput(f"{self} has {self.num_rows!r} rows: it takes a number from 1 to 2⁶²")
        if not _is_count(self.dim, 2**20):
            raise BadInput(f"{self} has rows of {self.dim!r} numbers: take from 1 to 2²⁰")
        if self.init not in ("normal", "uniform", "zeros"):
            raise BadInput(f'init is "normal", "uniform" or "zeros", not {self.init!r}')
        if not _is_number(self.scale) or not 0 <= self.scale < math.inf:
            raise BadInput(f"scale is a number from 0 on, not {self.scale!r}")

    def __str__(self) -> str:
        return f"table {self.name!r}"

    @functools.cached_property
    def _permutation(self) -> Permutation:
        return Permutation(self.num_rows, key_of("owner", self.name))

    def check(self, ids: Tensor) -> None:
        """Refuse ids that are no rows of this table, by the first that is not."""
        if ids.dtype != torch.int64 or ids.dim() != 1 or ids.device.type != "cpu":
            raise BadInput(
                f"ids of {self} are one row of int64 numbers on the CPU, not "
                f"{tuple(ids.shape)} of {ids.dtype} on {ids.device}"
            )
        if ids.numel():
            low, high = ids.aminmax()
            wrong = low if low < 0 else high
            if low < 0 or high >= self.num_rows:
                raise BadInput(
                    f"{self} has no row {int(wrong)}: its ids are 0 to {self.num_rows - 1}"
                )

    def place(self, ids: Tensor, shards: int) -> tuple[Ids, Ids]:
        """The shard that owns each id, and its slot among the rows of that shard.

        Ids are shuffled and dealt out in turn, so shards own equally many rows, and neighbours
        and often used rows are spread over them.
        """
        if shards == 1:
            return np.zeros(len(ids), np.int64), ids.numpy()
        slots, owners = np.divmod(self._permutation(ids.numpy()), shards)
        return owners, slots

    def owner(self, ids: Tensor, shards: int) -> Tensor:
        """The shard of each id, [n] int64."""
        self.check(ids)
        return torch.from_numpy(self.place(ids, shards)[0])

    def rows_of(self, shard: int, shards: int) -> int:
        """How many rows a shard owns."""
        return (self.num_rows - shard + shards - 1) // shards

    def initial(self, ids: Tensor) -> Tensor:
        """What rows start as, [n, dim]."""
        if self.init == "zeros":
            return torch.zeros(len(ids), self.dim)
        columns = -(-self.dim // 2)  # a word makes two numbers
        words = random_words(ids.numpy(), columns, key_of("rows", self.seed, self.name))
        first = ((words >> np.uint64(32)).astype(np.float32) + 0.5) / 2.0**32
        second = (words & np.uint64(0xFFFFFFFF)).astype(np.float32) / 2.0**32
        if self.init == "uniform":
            both = np.concatenate([first, second], axis=1) * 2 - 1
        else:
            radius = np.sqrt(-2 * np.log(first))
            angle = 2 * np.pi * second
            both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        return torch.from_numpy(both[:, : self.dim].astype(np.float32) * np.float32(self.scale))


def _refusal(what: str) -> BadInput:
    return BadInput(
        f"rows of shoal.Embedding cannot be trained by {what}: they take functools.partial of "
        "torch.optim.SGD without momentum and weight decay, Adagrad, Adam or SparseAdam; give it "
        "to shoal.Embedding(..., optimizer=...) where the rest of the model has another"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
