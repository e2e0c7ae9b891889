"""Ring attention: walks the schedule of `schedules/ring_attention.py`.

While a block of keys and values is on its way to the next rank, this rank computes with it. The
results of all blocks are merged by their log-sum-exp. In backward the gradients of keys and values
follow them round the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.call import PeerMessage
from shoal.comm.group import Group
from shoal.comm.transport.transport import DoneWork, Work
from shoal.replica.context.sequence_shard import SequenceSpec
from shoal.schedules.ring_attention import Hop, RingAttention

TILE_ELEMENTS = 1 << 22  # of scores that exist at a time


@dataclass(frozen=True)
class AttentionBlock:
    """Queries and keys that meet. `mask` is added to scores, or False where a key is left out.

    On the `diagonal` a query sees the keys up to its own place. `keep` is a dropout mask that is
    scaled already.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Tensor | None = None
    diagonal: bool = False
    keep: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return _computed_in(self.q)

    def tiles(self) -> list[slice]:
        """Ranges of queries."""
        queries = self.q.shape[-2]
        heads = self.q.numel() // max(1, queries * self.q.shape[-1])
        rows = max(1, TILE_ELEMENTS // max(1, heads * self.k.shape[-2]))
        return [slice(i, min(i + rows, queries)) for i in range(0, queries, rows)]

    def scores(self, rows: slice) -> Tensor:
        q = self.q[..., rows, :].to(self.dtype)
        scores = q @ self.k.to(self.dtype).transpose(-1, -2) * self.scale
        if self.mask is not None:
            mask = self.mask if self.mask.shape[-2] == 1 else self.mask[..., rows, :]
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores = scores + mask
        if self.diagonal:
            queries = torch.arange(rows.start, rows.stop, device=q.device)
            keys = torch.arange(self.k.shape[-2], device=q.device)
            scores.masked_fill_(keys > queries[:, None], -torch.inf)
        return scores

    def kept(self, rows: slice, probabilities: Tensor) -> Tensor:
        return probabilities if self.keep is None else probabilities * self.keep[..., rows, :]


def block_forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """(out, lse), where lse has no last dimension; a query without keys has out 0 and lse -inf."""
    outs = []
    normalizers = []
    values = block.v.to(block.dtype)
    for rows in block.tiles():
        scores = block.scores(rows)
        lse = scores.logsumexp(-1)
        probabilities = (scores - _finite(lse)[..., None]).exp_()
        outs.append(block.kept(rows, probabilities) @ values)
        normalizers.append(lse)
    return torch.cat(outs, -2), torch.cat(normalizers, -1)


def merge_blocks(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both."""
    total = torch.logaddexp(lse, more_lse)
    finite = _finite(total)
    ours = (lse - finite).exp()[..., None]
    theirs = (more_lse - finite).exp()[..., None]
    return out * ours + more * theirs, total


def block_backward(
    block: AttentionBlock, grad: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v; `lse` is that over all keys, `delta` the sum of grad · out."""
    dtype = block.dtype
    keys = block.k.to(dtype)
    values = block.v.to(dtype)
    dk = torch.zeros_like(keys)
    dv = torch.zeros_like(values)
    dqs = []
    for rows in block.tiles():
        probabilities = (block.scores(rows) - _finite(lse[..., rows])[..., None]).exp_()
        of_rows = grad[..., rows, :]
        dv += _sum_to(block.kept(rows, probabilities).transpose(-1, -2) @ of_rows, dv)
        dp = block.kept(rows, of_rows @ values.transpose(-1, -2))
        ds = probabilities * (dp - delta[..., rows, None]) * block.scale
        dqs.append(ds @ keys)
        dk += _sum_to(ds.transpose(-1, -2) @ block.q[..., rows, :].to(dtype), dk)
    return torch.cat(dqs, -2), dk, dv


def _computed_in(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _finite(lse: Tensor) -> Tensor:
    """A query without any key has no normalizer: its probabilities are 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _sum_to(grad: Tensor, like: Tensor) -> Tensor:
    """Several heads of queries may share a head of keys."""
    return grad if grad.shape == like.shape else grad.sum_to_size(like.shape)


_KEYS_TAG = 0
_GRADIENTS_TAG = 1


@dataclass(frozen=True)
class AttentionPlan:
    """One attention over a sequence. `mask` has this rank's queries and all keys, or is None."""

    group: Group
    spec: SequenceSpec
    causal: bool
    scale: float
    mask: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0

    @property
    def schedule(self) -> RingAttention:
        return RingAttention(self.group.size, self.causal)

    def _chunks(self, rank: int) -> dict[int, slice]:
        """The two chunks of a rank, and where each lies in what it has."""
        first, last = (len(r) for r in self.spec.ranges(rank))
        numbers = self.schedule.chunks(rank)
        return {numbers[0]: slice(0, first), numbers[1]: slice(first, first + last)}

    def blocks(self, q: Tensor, k: Tensor, v: Tensor, owner: int) -> Iterator[tuple[Any, ...]]:
        """What this rank computes with the keys of a rank: rows, columns, and the block."""
        for rows, columns, diagonal in self._pieces(owner):
            keys = k[..., columns, :]
            mask = self._mask_of(owner, rows, columns)
            keep = self._keep(q[..., rows, :], keys, owner, rows, columns)
            block = AttentionBlock(
                q[..., rows, :], keys, v[..., columns, :], self.scale, mask, diagonal, keep
            )
            yield rows, columns, block

    def _pieces(self, owner: int) -> Iterator[tuple[slice, slice, bool]]:
        """Ranges of this rank's queries and the owner's keys that meet, and which are masked."""
        rank = self.group.rank
        if not self.causal:
            yield slice(0, self.spec.count(rank)), slice(0, self.spec.count(owner)), False
            return
        queries = self._chunks(rank)
        keys = self._chunks(owner)
        for pair in self.schedule.pairs(rank, owner):
            rows = queries[pair.query]
            columns = keys[pair.key]
            if rows.stop > rows.start and columns.stop > columns.start:
                yield rows, columns, pair.diagonal

    def _mask_of(self, owner: int, rows: slice, columns: slice) -> Tensor | None:
        if self.mask is None or self.mask.shape[-1] == 1:
            return self.mask
        of_owner = self.spec.at(self.mask.dim() - 1).take_local(self.mask, owner)[..., columns]
        return of_owner if of_owner.shape[-2] == 1 else of_owner[..., rows, :]

    def _keep(self, q: Tensor, k: Tensor, owner: int, rows: slice, columns: slice) -> Tensor | None:
        """What dropout keeps, the same in forward and backward."""
        if self.dropout == 0.0:
            return None
        place = (self.group.rank * self.group.size + owner) * 4 + (rows.start > 0) * 2
        generator = torch.Generator(q.device)
        generator.manual_seed((self.seed + place + (columns.start > 0)) % (1 << 62))
        shape = (*q.shape[:-1], k.shape[-2])
        kept = torch.rand(shape, generator=generator, device=q.device) >= self.dropout
        return kept / (1.0 - self.dropout)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Of this rank's queries over the keys of all ranks; all of them call it."""
    out: Tensor = _RingAttention.apply(q, k, v, plan)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        dtype = _computed_in(q)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
        for owner, keys, values in _round_the_ring(k, v, plan):
            for rows, _, block in plan.blocks(q, keys, values, owner):
                merged = merge_blocks(out[..., rows, :], lse[..., rows], *block_forward(block))
                out[..., rows, :], lse[..., rows] = merged
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.plan = plan
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dK and dV of blocks go round the ring; each rank adds what it has computed."""
        q, k, v, out, lse = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        rank = plan.group.rank
        grad = grads[0].to(lse.dtype)
        delta = (grad * out.to(lse.dtype)).sum(-1)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        own: list[Tensor] = []
        incoming: Tensor | None = None
        work: Work = DoneWork()
        hops = iter(plan.schedule.hops(rank, plan.schedule.gradients))
        for owner, keys, values in _round_the_ring(k, v, plan):
            dk, dv = (t.new_zeros(t.shape, dtype=_computed_in(k)) for t in (keys, values))
            for rows, columns, block in plan.blocks(q, keys, values, owner):
                of_block = block_backward(
                    block, grad[..., rows, :], lse[..., rows], delta[..., rows]
                )
                dq[..., rows, :] += of_block[0]
                dk[..., columns, :] += of_block[1]
                dv[..., columns, :] += of_block[2]
            if owner == rank:
                own = [dk, dv]
                continue
            message = torch.cat([dk.reshape(-1), dv.reshape(-1)])
            if incoming is not None:
                work.wait()
                message += incoming
            incoming, work = _exchange(next(hops), message, k, v, plan, _GRADIENTS_TAG)
        if incoming is not None:
            work.wait()
            more = _unpack(incoming, k, v, plan, rank)
            own = [mine + theirs for mine, theirs in zip(own, more, strict=True)]
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None


def _round_the_ring(
    k: Tensor, v: Tensor, plan: AttentionPlan
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The keys and values of every rank, own ones first, each while it is sent on."""
    message = torch.cat([k.reshape(-1), v.reshape(-1)])
    owner = plan.group.rank
    keys = k
    values = v
    for hop in plan.schedule.hops(owner, plan.schedule.keys_and_values):
        incoming, work = _exchange(hop, message, k, v, plan, _KEYS_TAG)
        yield owner, keys, values
        work.wait()
        message = incoming
        owner = hop.received
        keys, values = _unpack(message, k, v, plan, owner)
    yield owner, keys, values


def _exchange(
    hop: Hop, message: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, tag: int
) -> tuple[Tensor, Work]:
    """What comes while `message` is sent on, and what to wait for."""
    shapes = _shapes(k, v, plan, hop.received)
    incoming = message.new_empty(sum(shape.numel() for shape in shapes))
    sends = [PeerMessage(message, hop.to, tag)]
    return incoming, plan.group.exchange(sends, [PeerMessage(incoming, hop.source, tag)])


def _shapes(k: Tensor, v: Tensor, plan: AttentionPlan, owner: int) -> list[torch.Size]:
    count = plan.spec.count(owner)
    return [torch.Size((*t.shape[:-2], count, t.shape[-1])) for t in (k, v)]


def _unpack(
    message: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, owner: int
) -> tuple[Tensor, Tensor]:
    shapes = _shapes(k, v, plan, owner)
    keys, values = torch.split(message, [shape.numel() for shape in shapes])
    return keys.view(shapes[0]), values.view(shapes[1])
