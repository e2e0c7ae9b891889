"""Parameters that several stages hold, such as an embedding that is also the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from shoal.comm.objects import PytreeChannel

_TAG = (1 << 30) - 1  # tags of messages between stages are smaller


class TiedWeights:
    """Every holder sends its gradient to the others, and all add them up in the same order."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        holders: Mapping[str, tuple[int, ...]],
        channel: PytreeChannel,
    ):
        self.channel = channel
        self.tied = [
            (p, holders[name]) for name, p in named if p.requires_grad and len(holders[name]) > 1
        ]
        self._tied_ids = {id(p) for p, _ in self.tied}
        first = {name: min(stages) for name, stages in holders.items()}
        self._counted_ids = {id(p) for name, p in named if first[name] == channel.group.rank}

    def is_tied(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._tied_ids

    def is_counted_here(self, parameter: nn.Parameter) -> bool:
        """True on one of the holders: what is a sum over all stages counts it once."""
        return id(parameter) in self._counted_ids

    def reduce_grads(self) -> None:
        """Replace the gradient of every tied weight by the sum over its holders."""
        rank = self.channel.group.rank
        for p, holders in self.tied:
            others = [stage for stage in holders if stage != rank]
            sent = [self.channel.send([p.grad], stage, _TAG) for stage in others]
            grads = {stage: self.channel.recv(stage, _TAG)[0] for stage in others}
            grads[rank] = p.grad
            p.grad = _sum([grads[stage] for stage in holders])
            for message in sent:
                message.wait()

    def synchronize_copies(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace what belongs to a tied weight by what its first holder has."""
        rank = self.channel.group.rank
        for p, holders in self.tied:
            if rank == holders[0]:
                for sent in [self.channel.send([tensors[p]], s, _TAG) for s in holders[1:]]:
                    sent.wait()
            else:
                tensors[p].copy_(self.channel.recv(holders[0], _TAG)[0])


def _sum(grads: Sequence[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            total = grad if total is None else total + grad
    return total
