"""Local SGD and DiLoCo: replicas train alone for some steps, then agree on their weights.

    agreed ──┬── replica 0: every steps ──┬── agreed - mean of (agreed - replica) ── …
             └── replica 1: every steps ──┘   or the outer optimizer's step on that mean

Replicas exchange how far they have come (agreed - own weights), which is what compresses well.
An agreement costs what a step of ddp costs, so bytes go down by `every`. With `overlap` it runs
beside the next steps; fragments of the model take turns:

    step           4      8      12     16     20     24             every=16, fragments=4, delay=6
    fragment 0     sent ─────▸ applied         sent ─────▸ applied
    fragment 1            sent ─────▸ applied         sent ─────▸ …

The outer optimizer of local SGD: its step on the weights that replicas agree on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shoal.comm.group import Op
from shoal.errors import CheckpointError
from shoal.runtime.trace import MIX
from shoal.server.model.expected_state import Form, expected_state, misfit
from shoal.strategy.options import outer_settings
from shoal.strategy.sync_terms import Localsgd
from shoal.sync import CountedSync, Replica, Sync, SyncPlan, compressed_sum, runs, under
from shoal.sync.compressed_sum import check_number, check_size
from shoal.sync.replica_mean import kept, mean_state


class Outer:
    """`nesterov(lr=0.7)` and the like, on slices of the flat buffer, each with its own rounds.

    Momentum comes in gradually: in round r it is r / (r + warmup), up to the one asked for. Early
    outer gradients all point the same way, and momentum of 0.9 would make ten of each of them.
    """

    def __init__(self, text: str, weights: Tensor, slices: Sequence[slice]):
        self.name, self.settings = outer_settings(text)
        self.weights = weights
        self.slices = slices
        self.params = [nn.Parameter(weights[at], requires_grad=False) for at in slices]
        self.rounds = [0] * len(slices)
        lr = self.settings["lr"]
        groups = [{"params": [p]} for p in self.params]
        self.optimizer: torch.optim.Optimizer
        if self.name == "adam":
            betas = self.settings["beta1"], self.settings["beta2"]
            self.optimizer = torch.optim.Adam(groups, lr, betas, self.settings["eps"])
        else:
            momentum = self.settings["momentum"]
            nesterov = self.name == "nesterov"
            self.optimizer = torch.optim.SGD(groups, lr, momentum, nesterov=nesterov)

    def step(self, number: int, difference: Tensor) -> None:
        """One round of a slice: how far the replicas have come, downhill from the weights."""
        self.rounds[number] += 1
        if self.settings.get("momentum"):
            warm = self.rounds[number] / (self.rounds[number] + self.settings["warmup"])
            self.optimizer.param_groups[number]["momentum"] = min(self.settings["momentum"], warm)
        self.params[number].grad = difference
        self.optimizer.step()
        self.params[number].grad = None

    def state(self) -> dict[str, Tensor]:
        """What has the shape of the weights, in full; single numbers are those of a first slice."""
        saved = {"rounds": torch.tensor(self.rounds)}
        for p, at in zip(self.params, self.slices, strict=True):
            for key, value in self.optimizer.state[p].items():
                if isinstance(value, Tensor) and value.dim():
                    saved.setdefault(key, torch.zeros_like(self.weights))[at] = value
                elif isinstance(value, Tensor):
                    saved.setdefault(key, value)
        return {f"{self.name}/{key}": value for key, value in saved.items()}

    def check_state(self, saved: dict[str, Tensor]) -> None:
        """Refuse what `load_state` could not take: all of the optimizer's tensors, or none."""
        state = under(f"{self.name}/", saved)
        for number in state.pop("rounds", torch.zeros(0)).reshape(-1):
            check_number(number)
        forms = expected_state(self.optimizer) or {}
        expected = forms.get(self.params[0], {})
        if state and set(state) != set(expected):
            raise CheckpointError(
                f"the checkpoint's state of the outer optimizer has {', '.join(sorted(state))}, "
                f"and {self.name} needs {', '.join(sorted(expected))}"
            )
        for key, tensor in state.items():
            if tensor.dim():
                check_size(tensor, self.weights)
                tensor = tensor[self.slices[0]]
            if problem := misfit(key, Form.of(tensor), self.params[0], expected):
                raise CheckpointError(f"the checkpoint's state of the outer optimizer: {problem}")

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Load what the same optimizer has saved; ignore what another one has."""
        state = under(f"{self.name}/", saved)
        if "rounds" in state:
            rounds = state.pop("rounds").reshape(-1).tolist()
            is_alike = len(rounds) == len(self.rounds)
            self.rounds = rounds if is_alike else [max(rounds, default=0)] * len(self.rounds)
        for p, at, steps in zip(self.params, self.slices, self.rounds, strict=True):
            for key, tensor in state.items():
                if tensor.dim():
                    value = tensor[at].to(p.device, copy=True)
                else:  # Adam's steps
                    value = torch.full_like(tensor, steps, device="cpu")
                self.optimizer.state[p][key] = value


@dataclass(eq=False)
class Fragment:
    """A slice of the buffer, and what is under way of it."""

    memory_column: ClassVar[str] = "in_flight"
    at: slice
    due: int  # it is sent after so many steps of a round
    left: int = 0  # steps until its average is applied; 0: none is under way
    difference: Tensor | None = None  # to the agreed weights: its own, then the mean of all
    origin: Tensor | None = None  # the weights of this replica when it was sent
    is_here: bool = False  # `difference` is the mean


class LocalSgdSync(CountedSync):
    """`every` steps alone, then one average; with `outer` an optimizer's step on the difference.

    With every=1 and an optimizer that is linear in the gradient (SGD, with momentum and weight
    decay) it is ddp: momenta stay local, and their mean is ddp's momentum. Clipping and Adam are
    not linear. `statistics` (BatchNorm's running ones) are averaged with the weights.

    With `overlap` an average is applied `delay` steps after it was sent, on top of what the
    replica has learned in between: weights = agreed + (weights - weights when sent). So each
    step of a replica is in exactly one average. The step at which it is applied is fixed, however
    long the messages take: every run has the same bits. Statistics stay local between evaluations.

    Evaluating and saving see the average of the replicas, also between two agreements, and
    leave training as it was. A checkpoint holds that average, the mean of the inner optimizers'
    states (rank 0's where replicas keep different ones), the weights agreed last, the outer
    optimizer's state, and the averages that are under way, for which saving waits; all replicas
    go on from it alike.
    """

    collects = False

    def __init__(self, replica: Replica, term: Localsgd):
        super().__init__(replica)
        flat = self.flat
        self.every = term.every
        self.delay = term.steps_under_way
        self.statistics = replica.statistics
        self.gradient_scale = float(self.group.size)
        self.agreed = flat.data.clone()
        self.since = 0
        self.undo_steps = term.every if term.elastic else 0
        slices = [at for at in flat.shards(term.fragments) if at.start < at.stop]
        # the loss travels with the weights, where something waits for them at all
        is_apart = self.delay or term.compress or len(slices) > 1
        self._sends_header = flat.offset > 0 and not is_apart
        if self._sends_header:
            slices = [slice(0, flat.size)]
        self.fragments = [
            Fragment(at, (i + 1) * term.every // len(slices)) for i, at in enumerate(slices)
        ]
        self.outer = Outer(term.outer, self.agreed, slices) if term.outer else None
        self.sums = compressed_sum.Sum(self.group)
        if term.compress:
            self.sums = compressed_sum.make_compressed_sum(
                term.compress, flat, self.group, slices, replica.copies
            )
        gaps = flat.gaps()
        self._gaps = [gaps[(gaps >= at.start) & (gaps < at.stop)] - at.start for at in slices]
        self._copies = replica.copies if term.compress else None  # sums in full are equal anyway
        self._loss: Tensor | None = None
        flat.grads.records_loss = True

    @property
    def is_agreed(self) -> bool:  # type: ignore[override]
        return self.since == 0 and not self.delay and len(self.fragments) == 1

    def regroup(self) -> None:
        """Training goes on from the weights that replicas agreed on last."""
        super().regroup()
        self.sums.group = self.group
        self.gradient_scale = float(self.group.size)

    def undo(self) -> None:
        self.since = 0
        self.sums.under_way.clear()

    def begin(self) -> None:
        self._loss = None

    def spread(self) -> None:
        self.traffic.steps += 1
        self.since += 1
        for number, fragment in enumerate(self.fragments):
            if fragment.left:
                self._come_nearer(number, fragment)
            if fragment.due == self.since:
                with self.update.tracer.span(MIX, f"agree on weights after {self.every} steps"):
                    self._send(fragment)
                    if not self.delay:
                        self._apply(number, fragment)
        self.since %= self.every

    def loss(self, local_loss: Tensor) -> Tensor:
        """The loss of the global batch where replicas agree; else the mean over own samples.

        Exactly that mean if all parts of the batch are equally large; ranks see different ones.
        """
        return local_loss * self.group.size if self._loss is None else self._loss

    def _send(self, fragment: Fragment) -> None:
        own = self.flat.data[fragment.at]
        fragment.left = self.delay
        fragment.is_here = False
        fragment.origin = own.clone() if self.delay else None
        fragment.difference = self.agreed[fragment.at] - own
        if self._sends_header:
            fragment.difference[0] = self.flat.grads.header[0]
        self.sums.start(fragment.difference, fragment.at)

    def _come_nearer(self, number: int, fragment: Fragment) -> None:
        fragment.left -= 1
        is_halfway = self.sums.num_stages == 2 and fragment.left == self.delay // 2
        if is_halfway and not fragment.is_here:
            self.sums.advance(fragment.at.start)  # its second stage, at the same step on all ranks
        if fragment.left == 0:
            with self.update.tracer.span(MIX, f"apply the average of {self.delay} steps ago"):
                self._apply(number, fragment)

    def _receive(self, number: int, fragment: Fragment) -> Tensor:
        """Wait for the mean of all replicas' differences."""
        assert fragment.difference is not None
        if not fragment.is_here:
            self.sums.finish_one(fragment.at)
            if self._sends_header:
                self._loss = fragment.difference[0].clone()
                fragment.difference[0] = 0.0
            fragment.difference[self._gaps[number]] = 0.0
            self.sums.clear_unused()
            compressed_sum.synchronize_copies(
                self.flat, fragment.difference, self._copies, fragment.at.start
            )
            fragment.difference /= self.group.size
            fragment.is_here = True
        return fragment.difference

    def _apply(self, number: int, fragment: Fragment) -> None:
        if not self.delay and not self._sends_header:
            loss = self.flat.grads.header[:1]
            self.group.all_reduce(loss).wait()
            self._loss = loss[0].clone()
        difference = self._receive(number, fragment)
        has_statistics = not self.delay and number == 0
        statistics = self._mean_statistics() if has_statistics else None
        # all communication is over: from here on a loss interrupts nothing
        own = self.flat.data[fragment.at]
        agreed = self.agreed[fragment.at]
        if self.outer is None:
            agreed -= difference
        else:
            self.outer.step(number, difference)
        if fragment.origin is None:
            own.copy_(agreed)
        else:
            own += agreed - fragment.origin
        if statistics is not None:
            _put(statistics, self.statistics)
        fragment.difference = fragment.origin = None

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
                if not self.is_agreed:
                    difference = self.agreed - self.flat.data
                    self.group.all_reduce(difference, Op.MEAN).wait()
                    means = self._mean_statistics()
                    torch.sub(self.agreed, difference, out=self.flat.data)
                    _put(means, self.statistics)
            yield

    def after_load(self) -> None:
        self.agreed.copy_(self.flat.data)
        self.since = 0

    def state(self) -> dict[str, Tensor]:
        saved = {"since": torch.tensor([self.since])}
        if not self.is_agreed:
            saved["agreed"] = self.agreed
        if any(fragment.left for fragment in self.fragments):
            saved["left"] = torch.tensor([fragment.left for fragment in self.fragments])
            saved["under_way"] = torch.zeros_like(self.agreed)
            for number, fragment in enumerate(self.fragments):
                if fragment.left:
                    saved["under_way"][fragment.at] = self._receive(number, fragment)
        if self.outer is not None:
            saved |= self.outer.state()
        with self.traffic.uncounted():
            saved |= self.sums.state()
        return {f"weights/{name}": tensor for name, tensor in saved.items()}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        saved = under("weights/", tensors)
        for name in {"agreed", "under_way"} & set(saved):
            compressed_sum.check_size(saved[name], self.agreed)
        if "since" in saved:
            compressed_sum.check_number(saved["since"])
        for number in saved.get("left", torch.zeros(0)).reshape(-1):
            compressed_sum.check_number(number)
        if self.outer is not None:
            self.outer.check_state(saved)
        self.sums.check_state(saved)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        saved = under("weights/", tensors)
        if "agreed" in saved:
            self.agreed.copy_(saved["agreed"])
            since = int(saved["since"].sum()) if "since" in saved else self.every
            self.since = min(since, self.every - 1)
        self._load_under_way(saved)
        if self.outer is not None:
            self.outer.load_state(saved)
        self.sums.load_state(saved)
        self.sums.clear_unused()

    def _load_under_way(self, saved: dict[str, Tensor]) -> None:
        """Averages that arrive later. Other fragments than saved leave them to the next average,

        which has all that was learned since the weights that were agreed on.
        """
        self.close()
        left = saved.get("left", torch.zeros(0)).reshape(-1).tolist()
        is_alike = "under_way" in saved and len(left) == len(self.fragments)
        for fragment, steps in zip(self.fragments, left if is_alike else [], strict=False):
            fragment.left = min(steps, self.delay)
            if fragment.left:
                fragment.difference = saved["under_way"][fragment.at].to(self.agreed, copy=True)
                fragment.origin = self.agreed[fragment.at] - fragment.difference
                fragment.is_here = True

    def summary(self) -> list[str]:
        return self.traffic.summary()

    def close(self) -> None:
        """Other replicas wait for what this one has to give."""
        self.sums.finish()
        for fragment in self.fragments:
            fragment.left = 0
            fragment.difference = None
            fragment.origin = None


def _put(flat: Tensor, into: Sequence[Tensor]) -> None:
    for tensor, part in zip(into, torch.split(flat, [t.numel() for t in into]), strict=True):
        tensor.copy_(part.view(tensor.shape))


@runs(Localsgd)
class LocalSgdPlan(SyncPlan[Localsgd]):
    def build(self, replica: Replica) -> Sync:
        return LocalSgdSync(replica, self.term)
