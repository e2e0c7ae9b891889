"""What becomes of a module under tp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.replica.tensor.layers import ColumnOutput

Kind = Literal["column", "row", "vocabulary", "attention"]


@dataclass(frozen=True)
class Role:
    kind: Kind
    unit: int = 1  # features that stay together
    blocks: int = 1  # of a column layer: queries, keys and values stand one after the other
    output: ColumnOutput = "sharded"  # of a column layer
    input_is_sharded: bool = True  # of a row layer


Roles = dict[str, Role]
