"""Local SGD and DiLoCo: replicas train alone for some steps, then agree on their weights.

    agreed ──┬── replica 0: every steps ──┬── agreed - mean of (agreed - replica) ── …
             └── replica 1: every steps ──┘   or the outer optimizer's step on that mean

Replicas exchange how far they have come (agreed - own weights), which is what compresses well.
An agreement costs what a step of ddp costs, so bytes go down by `every`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.comm.group import Op
from shoal.errors import CheckpointError
from shoal.runtime.trace import MIX
from shoal.server.model.expected_state import Form, expected_state, misfit
from shoal.strategy.options import outer_settings
from shoal.strategy.sync_terms import Localsgd
from shoal.sync import Replica, StepTraffic, Sync, SyncPlan, compressed_sum, runs, under
from shoal.sync.memory import ModelSizes, SyncMemory
from shoal.sync.replica_mean import kept, mean_state


class Outer:
    """`nesterov(lr=0.7)` and the like, on the flat buffer: all of them work element by element.

    Momentum comes in gradually: in round r it is r / (r + warmup), up to the one asked for. Early
    outer gradients all point the same way, and momentum of 0.9 would make ten of each of them.
    """

    def __init__(self, text: str, weights: nn.Parameter):
        self.name, self.settings = outer_settings(text)
        self.weights = weights
        self.rounds = 0
        lr = self.settings["lr"]
        self.optimizer: torch.optim.Optimizer
        if self.name == "adam":
            betas = self.settings["beta1"], self.settings["beta2"]
            self.optimizer = torch.optim.Adam([weights], lr, betas, self.settings["eps"])
        else:
            momentum = self.settings["momentum"]
            nesterov = self.name == "nesterov"
            self.optimizer = torch.optim.SGD([weights], lr, momentum, nesterov=nesterov)

    def step(self, difference: Tensor) -> None:
        """One round: `difference` is how far the replicas have come, downhill from the weights."""
        self.rounds += 1
        if self.settings.get("momentum"):
            warm = self.rounds / (self.rounds + self.settings["warmup"])
            self.optimizer.param_groups[0]["momentum"] = min(self.settings["momentum"], warm)
        self.weights.grad = difference
        self.optimizer.step()
        self.weights.grad = None

    def state(self) -> dict[str, Tensor]:
        held = self.optimizer.state[self.weights]
        tensors = {key: value for key, value in held.items() if isinstance(value, Tensor)}
        tensors["rounds"] = torch.tensor([self.rounds])
        return {f"{self.name}/{key}": value for key, value in tensors.items()}

    def check_state(self, saved: dict[str, Tensor]) -> None:
        """Refuse what `load_state` could not take: all of the optimizer's tensors, or none."""
        state = under(f"{self.name}/", saved)
        if "rounds" in state:
            compressed_sum.check_number(state.pop("rounds"))
        expected = (expected_state(self.optimizer) or {}).get(self.weights, {})
        if state and set(state) != set(expected):
            raise CheckpointError(
                f"the checkpoint's state of the outer optimizer has {', '.join(sorted(state))}, "
                f"and {self.name} needs {', '.join(sorted(expected))}"
            )
        for key, tensor in state.items():
            if problem := misfit(key, Form.of(tensor), self.weights, expected):
                raise CheckpointError(f"the checkpoint's state of the outer optimizer: {problem}")

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Load what the same optimizer has saved; ignore what another one has."""
        state = under(f"{self.name}/", saved)
        if "rounds" in state:
            self.rounds = int(state.pop("rounds"))
        for key, tensor in state.items():
            device = self.weights.device if tensor.dim() else "cpu"
            self.optimizer.state[self.weights][key] = tensor.to(device, copy=True)


def outer_state_bytes(text: str, buffer_bytes: int) -> int:
    """What the state of an outer optimizer takes after its first step."""
    name, settings = outer_settings(text)
    if name == "adam":
        return 2 * buffer_bytes + torch.float32.itemsize  # two moments, and the number of steps
    return buffer_bytes if settings["momentum"] else 0


class LocalSgdSync(Sync):
    """`every` steps alone, then one average; with `outer` an optimizer's step on the difference.

    With every=1 and an optimizer that is linear in the gradient (SGD, with momentum and weight
    decay) it is ddp: momenta stay local, and their mean is ddp's momentum. Clipping and Adam are
    not linear. `statistics` (BatchNorm's running ones) are averaged with the weights.

    Evaluating and saving see the average of the replicas, also between two agreements, and
    leave training as it was. A checkpoint holds that average, the mean of the inner optimizers'
    states (rank 0's where replicas keep different ones), the weights agreed last, and the outer
    optimizer's state; all replicas go on from it alike.
    """

    collects = False

    traffic: StepTraffic

    def __init__(self, replica: Replica, term: Localsgd):
        flat = replica.flat
        self.flat = flat
        self.update = replica.update
        self._replicas = replica.group
        self.traffic = StepTraffic()
        self.group = self.traffic.count(flat, replica.group)
        self.every = term.every
        self.statistics = replica.statistics
        self.gradient_scale = float(self.group.size)
        self.agreed = nn.Parameter(flat.data.clone(), requires_grad=False)
        self.since = 0
        self.undo_steps = term.every if term.elastic else 0
        self.outer = Outer(term.outer, self.agreed) if term.outer else None
        self._body = slice(flat.offset, flat.size)
        self.sums: compressed_sum.CompressedSum | None = None
        if term.compress:
            self.sums = compressed_sum.make_compressed_sum(
                term.compress, flat, self.group, [self._body], replica.copies
            )
        self._gaps = flat.gaps()
        self._copies = replica.copies
        self._loss: Tensor | None = None
        flat.grads.records_loss = True

    @property
    def is_agreed(self) -> bool:  # type: ignore[override]
        return self.since == 0

    def regroup(self) -> None:
        """Training goes on from the weights that replicas agreed on last."""
        self.group = self.traffic.count(self.flat, self._replicas)
        self.gradient_scale = float(self.group.size)

    def undo(self) -> None:
        self.since = 0

    def begin(self) -> None:
        self._loss = None

    def spread(self) -> None:
        self.traffic.steps += 1
        self.since += 1
        if self.since >= self.every:
            with self.update.tracer.span(MIX, f"agree on weights after {self.every} steps"):
                self._agree()

    def loss(self, local_loss: Tensor) -> Tensor:
        """The loss of the global batch where replicas agree; else the mean over own samples.

        Exactly that mean if all parts of the batch are equally large; ranks see different ones.
        """
        return local_loss * self.group.size if self._loss is None else self._loss

    def _agree(self) -> None:
        difference = self.agreed.data - self.flat.data
        loss = self._add_up(difference)
        statistics = self._mean_statistics()
        # all communication is over: from here on a loss interrupts nothing
        self._loss = loss
        difference /= self.group.size
        if self.outer is None:
            self.agreed.data -= difference
        else:
            self.outer.step(difference)
        self.flat.data.copy_(self.agreed.data)
        _put(statistics, self.statistics)
        self.since = 0

    def _add_up(self, difference: Tensor) -> Tensor:
        """Sum over all replicas in place; returns the sum of the losses, which travels with it."""
        loss = self.flat.grads.header[:1]
        if self.sums is None and self.flat.offset:
            difference[0] = loss[0]
            self.group.all_reduce(difference).wait()
            loss = difference[:1].clone()
            difference[0] = 0.0
            return loss[0]
        work = self.group.all_reduce(loss)
        if self.sums is None:
            self.group.all_reduce(difference).wait()
        else:
            self.sums.start(difference[self._body], self._body)
            self.sums.finish()
        work.wait()
        difference[self._gaps] = 0.0
        if self.sums is not None:
            self.sums.clear_unused()
            compressed_sum.synchronize_copies(self.flat, difference, self._copies)
        return loss[0].clone()

    def _mean_statistics(self) -> Tensor:
        if not self.statistics:
            return torch.zeros(0)
        everything = torch.cat([t.reshape(-1) for t in self.statistics])
        self.group.all_reduce(everything, Op.MEAN).wait()
        return everything

    # ------------------------------------------------------------------ around a run

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        with kept([self.flat.data, *self.statistics]), ExitStack() as stack:
            with self.traffic.uncounted():
                if optimizer:
                    stack.enter_context(mean_state(self.update.optimizer, self.group))
                if self.since:
                    difference = self.agreed.data - self.flat.data
                    self.group.all_reduce(difference, Op.MEAN).wait()
                    means = self._mean_statistics()
                    torch.sub(self.agreed.data, difference, out=self.flat.data)
                    _put(means, self.statistics)
            yield

    def after_load(self) -> None:
        self.agreed.data.copy_(self.flat.data)
        self.since = 0

    def state(self) -> dict[str, Tensor]:
        saved = {"since": torch.tensor([self.since])}
        if self.since:
            saved["agreed"] = self.agreed.data
        if self.outer is not None:
            saved |= self.outer.state()
        if self.sums is not None:
            with self.traffic.uncounted():
                saved |= self.sums.state()
        return {f"weights/{name}": tensor for name, tensor in saved.items()}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        saved = under("weights/", tensors)
        if "agreed" in saved:
            compressed_sum.check_size(saved["agreed"], self.agreed)
        if "since" in saved:
            compressed_sum.check_number(saved["since"])
        if self.outer is not None:
            self.outer.check_state(saved)
        if self.sums is not None:
            self.sums.check_state(saved)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        saved = under("weights/", tensors)
        if "agreed" in saved:
            self.agreed.data.copy_(saved["agreed"])
            self.since = int(saved["since"].sum()) if "since" in saved else self.every
        if self.outer is not None:
            self.outer.load_state(saved)
        if self.sums is not None:
            self.sums.load_state(saved)
            self.sums.clear_unused()

    def summary(self) -> list[str]:
        return self.traffic.summary()


def _put(flat: Tensor, into: Sequence[Tensor]) -> None:
    start = 0
    for tensor in into:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


@runs(Localsgd)
class LocalSgdPlan(SyncPlan[Localsgd]):
    def memory(self, sizes: ModelSizes, rank: int, replicas: int) -> SyncMemory:
        """With the anchor and the outer optimizer's state.

        When replicas agree, the difference takes the place of the gradients, which are freed.
        """
        plain = super().memory(sizes, rank, replicas)
        outer = outer_state_bytes(self.term.outer, sizes.buffer) if self.term.outer else 0
        copies = sizes.buffer + outer + sizes.gap_index
        if self.term.elastic:  # what a loss returns to (train/rollback.py)
            copies += sizes.buffer + plain.optimizer
        if self.term.compress is None:
            return replace(plain, copies=copies)
        body = slice(sizes.flat.offset, sizes.flat.size)
        compressed = compressed_sum.compressed_memory(
            self.term.compress, sizes, [body], rank, replicas
        )
        in_flight = sizes.buffer + compressed.in_flight
        return replace(plain, copies=copies, residuals=compressed.residuals, in_flight=in_flight)

    def build(self, replica: Replica) -> Sync:
        return LocalSgdSync(replica, self.term)
