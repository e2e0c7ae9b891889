"""Parameters that several stages hold: their gradients are one gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from shoal.comm.objects import PytreeChannel

_TAG = (1 << 30) - 1  # tags of messages between stages are smaller


class Ties:
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
        self._ids = {id(p) for p, _ in self.tied}
        first = {name: min(stages) for name, stages in holders.items()}
        self._counted = {id(p) for name, p in named if first[name] == channel.group.rank}

    def is_tied(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._ids

    def is_counted_here(self, parameter: nn.Parameter) -> bool:
        """True on one of the holders: what is a sum over all stages counts it once."""
        return id(parameter) in self._counted

    def add_up(self) -> None:
        mine = self.channel.group.rank
        for p, holders in self.tied:
            others = [stage for stage in holders if stage != mine]
            sent = [self.channel.send([p.grad], stage, _TAG) for stage in others]
            parts = {stage: self.channel.recv(stage, _TAG)[0] for stage in others}
            parts[mine] = p.grad
            p.grad = _sum([parts[stage] for stage in holders])
            for one in sent:
                one.wait()

    def even_out(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace what belongs to a tied parameter by what its first holder has."""
        mine = self.channel.group.rank
        for p, holders in self.tied:
            if mine == holders[0]:
                for sent in [self.channel.send([tensors[p]], s, _TAG) for s in holders[1:]]:
                    sent.wait()
            else:
                tensors[p].copy_(self.channel.recv(holders[0], _TAG)[0])


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total
