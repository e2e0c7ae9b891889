"""The sizes of a transformer."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import BadInput


@dataclass(frozen=True)
class TransformerSizes:
    """The sizes of a decoder; `kv_heads` below `heads` is grouped-query attention."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 51200
    sequence: int = 2048
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    experts: int = 1
    top_k: int = 1
    dropout: bool = True
    tied: bool = True
    learned_positions: bool = True
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "sequence", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} of a transformer must be 1 or more")
        if self.hidden % self.heads or self.heads % self.key_heads:
            raise BadInput(
                f"heads={self.heads} must divide hidden={self.hidden}, and kv_heads="
                f"{self.key_heads} must divide heads"
            )

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Columns of the matrix that makes queries, keys and values."""
        return self.hidden + 2 * self.key_heads * self.head_size
