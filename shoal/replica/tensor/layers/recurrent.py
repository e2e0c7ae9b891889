"""nn.LSTM and nn.GRU of which every rank of a tp group has some hidden units.

The weights of a layer are blocks of rows, one for each gate; a rank has the rows of its units in
each block. The inputs of all time steps are projected at once. Then each time step computes the
gates of the rank's units and gathers the hidden state: one all-gather forward, and one
reduce-scatter backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from shoal.comm.group import Group
from shoal.replica.tensor.activations.shard_spec import ShardSpec
from shoal.replica.tensor.activations.sharded_tensor import full_tensors
from shoal.replica.tensor.layers.linear import TensorParallelLayer
from shoal.replica.tensor.mappings import copy, gather, gather_sequence, scatter
from shoal.replica.tensor.rng import TensorParallelRng

GATES: dict[type[nn.Module], int] = {nn.LSTM: 4, nn.GRU: 3}


def is_recurrent(module: nn.Module, ranks: int) -> bool:
    """Whether its hidden units can be split; one with projections (`proj_size`) stays whole."""
    if not isinstance(module, nn.RNNBase) or type(module) not in GATES:
        return False
    return not module.proj_size and module.hidden_size >= ranks and "forward" not in vars(module)


class ParallelRecurrent(TensorParallelLayer):
    """Called as nn.LSTM or nn.GRU."""

    def __init__(self, original: nn.RNNBase, group: Group, rng: TensorParallelRng):
        super().__init__(original, group, rng)
        self.is_lstm = isinstance(original, nn.LSTM)
        self.input_size = original.input_size
        self.hidden_size = original.hidden_size
        self.num_layers = original.num_layers
        self.bias = original.bias
        self.batch_first = original.batch_first
        self.dropout = original.dropout
        self.bidirectional = original.bidirectional
        self.units = ShardSpec.even(1, original.hidden_size, group.size)
        gates = GATES[type(original)]
        rows = ShardSpec.of_blocks(0, gates, original.hidden_size, group.size, 1)
        for name, parameter in original._parameters.items():
            self.register(name, parameter, rows)

    def flatten_parameters(self) -> None:
        """What models call for cuDNN."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            return self._packed(input, full_tensors(hx))
        x, states = full_tensors((input, hx))
        is_batched = x.dim() == 3
        if not is_batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        out, last = self._layers(x, self._initial(states, x, is_batched))
        if not is_batched:
            return out.squeeze(1), self._returned([s.squeeze(1) for s in last])
        return (out.transpose(0, 1) if self.batch_first else out), self._returned(last)

    def _packed(self, packed: PackedSequence, given: Any) -> Any:
        """Padded; the states of a row do not change where it has no time step."""
        x, lengths = pad_packed_sequence(packed)
        times = torch.arange(len(x))[:, None]
        mask = (times < lengths).to(x.device)[..., None]
        out, last = self._layers(x, self._initial(given, x, True), mask)
        if packed.sorted_indices is not None:
            out = out.index_select(1, packed.sorted_indices)
            lengths = lengths[packed.sorted_indices.to(lengths.device)]
        data = pack_padded_sequence(out, lengths).data
        order = (packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        return PackedSequence(data, *order), self._returned(last)

    def _returned(self, last: list[Tensor]) -> Any:
        return (last[0], last[1]) if self.is_lstm else last[0]

    def _initial(self, given: Any, x: Tensor, is_batched: bool) -> list[Tensor]:
        """(layers and directions, batch, hidden); of an LSTM also the cells."""
        directions = 2 if self.bidirectional else 1
        shape = (self.num_layers * directions, x.shape[1], self.hidden_size)
        if given is None:
            return [x.new_zeros(shape) for _ in range(1 + self.is_lstm)]
        states = list(given) if self.is_lstm else [given]
        states = states if is_batched else [s.unsqueeze(1) for s in states]
        for state in states:
            if state.shape != shape:
                raise RuntimeError(f"expected an initial state of {shape}, got {[*state.shape]}")
        return states

    def _layers(
        self, x: Tensor, states: list[Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """x is (time, batch, features)."""
        ends: list[list[Tensor]] = []
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        for layer in range(self.num_layers):
            if layer and self.training and self.dropout:
                x = F.dropout(x, self.dropout)
            outs = []
            for suffix in suffixes:
                start = [s[len(ends)] for s in states]
                out, end = self._direction(x, f"l{layer}{suffix}", start, mask)
                outs.append(out)
                ends.append(end)
            x = torch.cat(outs, -1)
        return x, [torch.stack(parts) for parts in zip(*ends, strict=True)]

    def _direction(
        self, x: Tensor, name: str, start: list[Tensor], mask: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """One layer in one direction: outputs, and the states behind the last time step."""
        b_ih, b_hh = (self._parameters.get(f"bias_{kind}_{name}") for kind in ("ih", "hh"))
        w_hh = self._parameters[f"weight_hh_{name}"]
        assert w_hh is not None
        projected = F.linear(copy(x, self.group), self._weight_ih(name), b_ih).unbind(0)
        hidden = copy(start[0], self.group)
        own = [scatter(s, self.units, self.group) for s in start]
        outs: list[Tensor] = []
        times = range(len(projected))
        for time in reversed(times) if name.endswith("_reverse") else times:
            new = self._cell(projected[time], F.linear(hidden, w_hh, b_hh), own)
            if mask is not None:
                new = [n.where(mask[time], o) for n, o in zip(new, own, strict=True)]
            own = new
            hidden = gather_sequence(own[0], self.units, self.group)
            outs.append(own[0])
        if name.endswith("_reverse"):
            outs.reverse()
        stacked = torch.stack(outs)
        units = ShardSpec(2, self.units.ranges)
        return gather(stacked, units, self.group), [gather(s, self.units, self.group) for s in own]

    def _weight_ih(self, name: str) -> Tensor:
        weight = self._parameters[f"weight_ih_{name}"]
        assert weight is not None
        return weight

    def _cell(self, x: Tensor, h: Tensor, own: list[Tensor]) -> list[Tensor]:
        """The next states of this rank's units."""
        if self.is_lstm:
            i, f, g, o = (x + h).chunk(4, -1)
            cell = f.sigmoid() * own[1] + i.sigmoid() * g.tanh()
            return [o.sigmoid() * cell.tanh(), cell]
        reset_x, update_x, new_x = x.chunk(3, -1)
        reset_h, update_h, new_h = h.chunk(3, -1)
        update = (update_x + update_h).sigmoid()
        new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
        return [new + update * (own[0] - new)]
