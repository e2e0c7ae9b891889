"""An embedding table as a value that can be sent: size, initialization, optimizer."""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.errors import BadInput
from shoal.server.embedding.hashing import Ids, Permutation, key_of, random_words
from shoal.server.embedding.native import require_native

Kind = Literal["sgd", "adagrad", "adam"]
Init = Literal["normal", "uniform", "zeros"]
Placement = Literal["hash", "range"]
LARGEST_SHARD = 2**31 - 2  # rows of one shard: their positions are int32
LARGEST_TABLE = 2**62
LARGEST_COUNT = 2**31
MAX_CACHE_STEPS = 1024

# options of a torch optimizer that rows support, and those that do not change its arithmetic
_CLASSES: dict[type, tuple[Kind, set[str]]] = {
    torch.optim.SGD: ("sgd", {"lr"}),
    torch.optim.Adagrad: ("adagrad", {"lr", "eps", "initial_accumulator_value"}),
    torch.optim.Adam: ("adam", {"lr", "betas", "eps"}),
    torch.optim.SparseAdam: ("adam", {"lr", "betas", "eps"}),
}
_SWITCHES = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


@dataclass(frozen=True)
class RowOptimizer:
    """How a gradient changes its row. Rows without a gradient in a step do not change.

    sgd       row -= lr g
    adagrad   sum += g²;  row -= lr g / (√sum + eps)
    adam      as torch.optim.SparseAdam: the averages of a row move only in steps that touch it,
              and the bias correction counts updates of the table, not of the row
    """

    kind: Kind
    lr: float
    eps: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    initial_accumulator_value: float = 0.0  # what Adagrad's sums start from

    def __post_init__(self) -> None:
        numbers = (self.lr, self.eps, self.initial_accumulator_value, *self.betas)
        is_fitting = all(_is_number(each) and 0 <= each < math.inf for each in numbers)
        if not is_fitting or len(self.betas) != 2 or max(self.betas) >= 1:
            raise BadInput(f"{self}: its numbers must be >= 0, and its two betas below 1")

    @classmethod
    def of(cls, factory: Any) -> RowOptimizer:
        """From a torch optimizer, such as `functools.partial(torch.optim.Adagrad, lr=0.1)`.

        Accepts SGD without momentum, Adagrad, Adam and SparseAdam. The last two become "adam".
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
        beta1, beta2 = values.pop("betas", (0.0, 0.0))
        numbers = {name: float(value) for name, value in values.items()}
        return cls(kind, betas=(float(beta1), float(beta2)), **numbers)

    def initial_state(self) -> dict[str, float]:
        """The optimizer state of a row, by name, with its initial value."""
        return {
            "sgd": {},
            "adagrad": {"sum": self.initial_accumulator_value},
            "adam": {"exp_avg": 0.0, "exp_avg_sq": 0.0},
        }[self.kind]


UNNAMED = "embedding"  # until job.step names the table by its path in the model


@dataclass(frozen=True)
class TableSpec:
    """A table as all its shards and users know it.

    The initial value of a row, and the shard that owns it, follow from this value alone.

    A step sees a row if it is in the batch. With `min_count=k` a row is trained from the k-th step
    that sees it: until then it has its initial value, and its gradients are ignored. With
    `ttl_steps=t` a row that t steps in a row do not see leaves: it has its initial value again,
    and its memory is freed. Steps are updates of the table.
    """

    name: str
    num_rows: int
    dim: int
    init: Init = "normal"  # N(0, scale²), uniform from -scale to scale, or zeros
    scale: float = 1.0
    seed: int = 0
    optimizer: RowOptimizer | None = None
    placement: Placement = "hash"
    min_count: int = 1
    ttl_steps: int | None = None
    hot_share: float = 0.0  # rows over this share of all pulls are copied to all servers; 0: none
    cache_steps: int = 0  # steps for which a worker may use a pulled row again

    def __post_init__(self) -> None:
        require_native(str(self))
        limits = {"num_rows": LARGEST_TABLE, "dim": 2**20, "min_count": LARGEST_COUNT}
        limits |= {} if self.ttl_steps is None else {"ttl_steps": LARGEST_TABLE}
        limits |= {"cache_steps": MAX_CACHE_STEPS} if self.cache_steps != 0 else {}
        for name, most in limits.items():
            if not _is_count(getattr(self, name), most):
                raise self._wrong(name, f"from 1 to {most}")
        if self.init not in ("normal", "uniform", "zeros"):
            raise self._wrong("init", '"normal", "uniform" or "zeros"')
        if self.placement not in ("hash", "range"):
            raise self._wrong("placement", '"hash" or "range"')
        if not _is_number(self.scale) or not 0 <= self.scale < math.inf:
            raise self._wrong("scale", "a number >= 0")
        if not _is_number(self.hot_share) or not 0 <= self.hot_share < 1:
            raise self._wrong("hot_share", "a share of all pulls, from 0 to 1")

    def _wrong(self, name: str, rule: str) -> BadInput:
        return BadInput(f"{self}: {name} must be {rule}, not {getattr(self, name)!r}")

    @property
    def keeps_rows(self) -> bool:
        """Whether a row that was used once stays; else rows come and go."""
        return self.min_count == 1 and self.ttl_steps is None

    def __str__(self) -> str:
        if self.name == UNNAMED:  # its model, which names it, is not known yet
            return f"shoal.Embedding({self.num_rows}, {self.dim})"
        return f"table {self.name!r}"

    @functools.cached_property
    def _permutation(self) -> Permutation:
        return Permutation(self.num_rows, key_of("owner", self.name))

    def check_type(self, ids: Tensor) -> None:
        """Refuse what is no list of ids."""
        if ids.dtype != torch.int64 or ids.dim() != 1 or ids.device.type != "cpu":
            raise BadInput(
                f"ids of {self} must be a 1-d int64 tensor on the CPU, not "
                f"{tuple(ids.shape)} of {ids.dtype} on {ids.device}"
            )

    def check(self, ids: Tensor) -> None:
        """Refuse ids that are out of range."""
        self.check_type(ids)
        if ids.numel():
            numbers = ids.numpy()
            low = int(numbers.min())
            high = int(numbers.max())
            if low < 0 or high >= self.num_rows:
                wrong = low if low < 0 else high
                raise BadInput(f"{self} has no row {wrong}: ids are 0 to {self.num_rows - 1}")

    def locate(self, ids: Tensor, shards: int) -> tuple[Ids, Ids]:
        """The shard that owns each id, and its slot among the rows of that shard.

        By hash, ids are shuffled and assigned to shards in turn. Shards own equally many rows, and
        neighbours and frequent rows are spread over them. By range, each shard owns neighbours.
        """
        if shards == 1:
            return np.zeros(len(ids), np.int64), ids.numpy()
        if self.placement == "range":
            width = -(-self.num_rows // shards)
            owners = ids.numpy() // width
            return owners, ids.numpy() - owners * width
        return self._permutation.deal(ids.numpy(), shards)

    def owner(self, ids: Tensor, shards: int) -> Tensor:
        """The shard of each id, [n] int64."""
        self.check(ids)
        return torch.from_numpy(self.locate(ids, shards)[0])

    def rows_of(self, shard: int, shards: int) -> int:
        """The number of rows that a shard owns."""
        if self.placement == "range":
            width = -(-self.num_rows // shards)
            return min(max(0, self.num_rows - shard * width), width)
        return (self.num_rows - shard + shards - 1) // shards

    def initial(self, ids: Tensor) -> Tensor:
        """Initial rows, [n, dim]."""
        if self.init == "zeros":
            return torch.zeros(len(ids), self.dim)
        columns = -(-self.dim // 2)  # one word gives two numbers
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
        f"rows of shoal.Embedding cannot be trained by {what}: use functools.partial of "
        "torch.optim.SGD without momentum and weight decay, Adagrad, Adam or SparseAdam; pass it "
        "to shoal.Embedding(..., optimizer=...) if the rest of the model needs another"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
