"""The plan of `ps`: workers of a model whose weights live on servers."""

from __future__ import annotations

import math
from dataclasses import replace

from shoal.compress.catalog import make_compressor
from shoal.compress.powersgd import PowerSgd
from shoal.replica.ordered_sum import full_subtrees, runs_of
from shoal.schedules.buffer_layout import PUSH_BUCKET_BYTES
from shoal.server.messages import ParameterSlice
from shoal.server.model.partition import FlatParameter, ServerSlice, partition
from shoal.strategy.ps_term import Ps
from shoal.sync import Replica, StepSettings, Sync, SyncPlan, runs
from shoal.sync.compressed_sum import refuse_scaled
from shoal.sync.memory import ModelSizes, SyncMemory
from shoal.sync.ps.connect import join_servers
from shoal.sync.residuals import INDEX_BYTES, residual_dtype


@runs(Ps)
class PsPlan(SyncPlan[Ps]):
    @property
    def can_be_exact(self) -> bool:
        return self.term.compress is None

    def check(self, options: StepSettings, replicas: int) -> None:
        super().check(options, replicas)
        if self.term.compress is not None:
            refuse_scaled(self.term, options)

    def memory(self, sizes: ModelSizes, rank: int, replicas: int) -> SyncMemory:
        """On CPUs, with workers and servers on one host.

        Gradients are pushed from a segment, `out`, and weights (or sums) pulled into `inbox`.
        Without compression `out` is the gradient buffer. Where servers update and all workers
        wait, the parameters live in the servers' memory and take the place of `inbox`.
        """
        plain = super().memory(sizes, rank, replicas)
        exact = sizes.exact_microbatches
        is_out_gradients = exact is None and self.term.compress is None
        out = 0 if is_out_gradients else self._sums_per_push(sizes, replicas) * sizes.buffer
        inbox = 0 if self._shares_weights(sizes) else sizes.buffer
        state = sizes.first_state if self.term.update == "server" else sizes.state
        return replace(
            plain,
            gradients=sizes.bucketed_gradients(sizes.flat.buckets(PUSH_BUCKET_BYTES)),
            optimizer=sum(state.values()),
            copies=0 if exact is None else sizes.exact_sums(rank, replicas),
            residuals=self._residuals(sizes, replicas),
            shared=out + inbox,
            server=self._server(sizes, rank, replicas),
        )

    def _shares_weights(self, sizes: ModelSizes) -> bool:
        """Whether the model uses the weights where the servers keep them.

        Stages that get compressed sums take copies, to make those of tied weights equal. Where
        servers have replicas, a worker outlives the server that it has the weights from.
        """
        is_split_compressed = sizes.is_stage and self.term.compress is not None
        takes_copies = self.term.replicas > 1 or is_split_compressed or self.term.on != "cpu"
        return self.term.update == "server" and self.term.lockstep and not takes_copies

    def _sums_per_push(self, sizes: ModelSizes, replicas: int) -> int:
        exact = sizes.exact_microbatches
        if exact is None:
            return 1
        return max(len(full_subtrees((0, exact), run)) for run in runs_of(exact, replicas))

    def _residuals(self, sizes: ModelSizes, replicas: int) -> int:
        """Those of `CompressedPush`: one, a copy of it where late pushes are dropped, and bases."""
        if self.term.compress is None:
            return 0
        drops = self.term.quorum is not None and self.term.late == "drop"
        residual = sizes.flat.size * residual_dtype(sizes.flat.dtype).itemsize
        index = INDEX_BYTES * sizes.unused_in(slice(sizes.flat.offset, sizes.flat.size))
        bases = sum(self._basis(held) for held in self._slices(sizes, replicas))
        return residual * (2 if drops else 1) + sizes.gap_index + index + bases

    def _basis(self, held: ServerSlice) -> int:
        """Bytes of PowerSGD's basis for one server's slice."""
        assert self.term.compress is not None
        shapes = [(piece.start - held.start, piece.shape) for piece in held.slices]
        compressor = make_compressor(self.term.compress, shapes, held.stop - held.start)
        return 4 * compressor.num_right if isinstance(compressor, PowerSgd) else 0

    def _server(self, sizes: ModelSizes, rank: int, replicas: int) -> int:
        """The server that lives in this worker: weights, their sum, optimizer state, pushes."""
        hosts = {"servers": False, "rank0": rank == 0, "workers": True}[self.term.placement]
        if not hosts:
            return 0
        return self._server_bytes(sizes, self._slices(sizes, replicas)[rank], replicas)

    def server_memory(self, sizes: ModelSizes, replicas: int) -> list[int]:
        if self.term.placement != "servers":
            return []
        slices = self._slices(sizes, replicas)
        shards = [self._server_bytes(sizes, held, replicas) for held in slices]
        return [held for held in shards for _ in range(self.term.replicas)]

    def _server_bytes(self, sizes: ModelSizes, held: ServerSlice, replicas: int) -> int:
        slice_bytes = (held.stop - held.start) * sizes.width
        buffers = 1 if self._shares_weights(sizes) else 2
        if self.term.compress is not None or self.term.replicas > 1:
            buffers += replicas  # a push of each
        state = 0
        if self.term.update == "server":
            state = sum(_state_of(piece, sizes) for piece in held.slices)
        basis = 0 if self.term.compress is None else self._basis(held)
        return buffers * slice_bytes + state + basis

    def _slices(self, sizes: ModelSizes, replicas: int) -> list[ServerSlice]:
        servers = replicas if self.term.placement == "workers" else self.term.servers
        parameters = [
            FlatParameter(param.name, param.start, tuple(p.shape))
            for param, p in zip(sizes.flat.ranges, sizes.flat.params, strict=True)
        ]
        return partition(parameters, sizes.flat.size, servers, sizes.exact_microbatches is None)

    def build(self, replica: Replica) -> Sync:
        return join_servers(self.term, replica)


def _state_of(piece: ParameterSlice, sizes: ModelSizes) -> int:
    """Bytes of optimizer state of the rows of a parameter that one server holds."""
    name, parameter = sizes.flat.named[piece.parameter]
    return sizes.state[name] * math.prod(piece.shape) // parameter.numel()
